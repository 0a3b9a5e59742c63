/* Register the kernels as operators of torch, whose namespace is the name of the extension; ssvit/kernels/operators.py
 * documents them. Tensors are bfloat16 and contiguous on a CPU, parameters and their gradients float32; widths are
 * multiples of 16.
 *
 * Letters: b images, q queries, t tokens, r rows, d width, i inputs, o outputs.
 */

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include "layers.h"

using at::Tensor;
using std::optional;
using std::tuple;
using std::vector;
using Sizes = at::IntArrayRef;

/* Return the values of a tensor of a type and shape. */
template <class T>
static T *values(const Tensor &tensor, at::ScalarType type, Sizes shape) {
    TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == type && tensor.sizes() == shape &&
                    tensor.is_contiguous(), "expected contiguous ", type, " of shape ", shape, ", got ",
                tensor.scalar_type(), " of shape ", tensor.sizes());
    return (T *)tensor.data_ptr();
}

static bf16 *halves(const Tensor &tensor, Sizes shape) { return values<bf16>(tensor, at::kBFloat16, shape); }
static float *floats(const Tensor &tensor, Sizes shape) { return values<float>(tensor, at::kFloat, shape); }

static Tensor new_halves(Sizes shape) { return at::empty(shape, at::kBFloat16); }
static Tensor new_floats(Sizes shape) { return at::empty(shape, at::kFloat); }

static void check_widths(Sizes widths) {
    for (int64_t width : widths) TORCH_CHECK(width % 16 == 0, "expected a multiple of 16, got ", width);
}

static int64_t head_width(int64_t d, int64_t heads) {
    TORCH_CHECK(heads > 0 && d % heads == 0, "expected heads that divide ", d, ", got ", heads);
    check_widths({d / heads});
    return d / heads;
}

/* Scratch memory of a number of pairs. */
struct Scratch {
    Tensor tensor;
    explicit Scratch(int64_t pairs) : tensor(new_floats({pairs})) {}
    pair *pairs() { return (pair *)tensor.data_ptr(); }
    float *floats() { return (float *)tensor.data_ptr(); }
};

/* Return a weight (o, i), or the result of `apply_pack` for it, (o / 16, pairs, 16, 2) bfloat16. */
static Weight weight_of(const Tensor &weight, int64_t o, int64_t i) {
    if (weight.dim() == 2) return {floats(weight, {o, i}), 0};
    return {0, (const pair *)halves(weight, {o / 16, packed_pairs(i), 16, 2})};
}

static Tensor apply_pack(const Tensor &weight) {
    int64_t o = weight.size(0), i = weight.size(1);
    check_widths({i, o});
    Tensor packed = new_halves({o / 16, packed_pairs(i), 16, 2});
    pack(floats(weight, {o, i}), i, o, (pair *)packed.data_ptr(), at::get_num_threads());
    return packed;
}

static Tensor apply_linear(const Tensor &x, const Tensor &weight, const Tensor &bias) {
    int64_t r = x.size(0), i = x.size(1), o = bias.size(0);
    check_widths({i, o});
    Tensor out = new_halves({r, o});
    Scratch scratch(linear_scratch(i, o));
    linear(halves(x, {r, i}), weight_of(weight, o, i), floats(bias, {o}), 0, halves(out, {r, o}), 0, false, r, i, o,
           scratch.pairs(), at::get_num_threads());
    return out;
}

static Tensor apply_linear_inputs(const Tensor &gradient, const Tensor &weight) {
    int64_t r = gradient.size(0), o = weight.size(0), i = weight.size(1);
    check_widths({i, o});
    Tensor out = new_halves({r, i});
    Scratch scratch(linear_scratch(i, o));
    linear_inputs(halves(gradient, {r, o}), floats(weight, {o, i}), 0, halves(out, {r, i}), r, i, o, scratch.pairs(),
                  at::get_num_threads());
    return out;
}

static tuple<Tensor, Tensor> apply_linear_weights(const Tensor &gradient, const Tensor &x) {
    int64_t r = x.size(0), o = gradient.size(1), i = x.size(1);
    check_widths({i, o});
    Tensor to_weight = new_floats({o, i}), to_bias = new_floats({o});
    Scratch scratch(linear_weights_scratch(i, at::get_num_threads()));
    linear_weights(halves(gradient, {r, o}), halves(x, {r, i}), floats(to_weight, {o, i}), floats(to_bias, {o}), r, i,
                   o, scratch.pairs(), at::get_num_threads());
    return {to_weight, to_bias};
}

/* Queries, keys and values of attention: separate queries, or all in one tensor. */
struct Parts {
    int64_t b, q, t, d, query_stride, stride;
    bf16 *query, *key, *value;

    Parts(const optional<Tensor> &asking, const Tensor &packed) {
        b = packed.size(0), t = packed.size(1), stride = packed.size(2), d = stride / (asking ? 2 : 3);
        q = asking ? asking->size(1) : t, query_stride = asking ? d : stride;
        key = halves(packed, {b, t, asking ? 2 * d : 3 * d});
        query = asking ? halves(*asking, {b, q, d}) : key;
        if (!asking) key += d;
        value = key + d;
    }
};

static tuple<Tensor, Tensor> apply_attention(const optional<Tensor> &query, const Tensor &packed, int64_t heads) {
    Parts in(query, packed);
    int64_t width = head_width(in.d, heads);
    int threads = at::get_num_threads();
    Tensor out = new_halves({in.b, in.q, in.d}), norms = new_floats({in.b, heads, in.q, 2});
    Scratch scratch(attention_scratch(in.q, in.t, width, threads));
    attention(in.query, in.query_stride, in.key, in.value, in.stride, halves(out, out.sizes()),
              floats(norms, norms.sizes()), in.b, heads, in.q, in.t, width, scratch.pairs(), threads);
    return {out, norms};
}

static vector<Tensor> apply_attention_backward(const optional<Tensor> &query, const Tensor &packed,
                                               const Tensor &gradient, const Tensor &norms) {
    Parts in(query, packed);
    int64_t heads = norms.size(1), width = head_width(in.d, heads);
    int threads = at::get_num_threads();
    vector<Tensor> to = {at::empty_like(packed)};
    if (query) to.push_back(at::empty_like(*query));
    Parts out(query ? optional<Tensor>(to[1]) : std::nullopt, to[0]);
    Scratch scratch(attention_scratch(in.q, in.t, width, threads));
    attention_backward(in.query, in.query_stride, in.key, in.value, in.stride, halves(gradient, {in.b, in.q, in.d}),
                       floats(norms, {in.b, heads, in.q, 2}), out.query, out.key, out.value, in.b, heads, in.q, in.t,
                       width, scratch.pairs(), threads);
    return to;
}

static Tensor apply_rotate(const Tensor &x, const Tensor &angles, int64_t rotated, bool back) {
    int64_t b = x.size(0), t = x.size(1), width = x.size(2), images = angles.size(1), half = angles.size(3);
    TORCH_CHECK((images == b || images == 1) && rotated <= width && rotated % (2 * half) == 0);
    Tensor out = at::empty_like(x);
    rotate(halves(x, {b, t, width}), floats(angles, {2, images, t, half}), images * t, back ? -1 : 1,
           halves(out, {b, t, width}), b * t, width, rotated, half, at::get_num_threads());
    return out;
}

static tuple<Tensor, Tensor> apply_layer_norm(const Tensor &x, const Tensor &weight, const Tensor &bias,
                                              double epsilon) {
    int64_t r = x.size(0), d = x.size(1);
    Tensor out = at::empty_like(x), moments = new_floats({r, 2});
    norm_forward(halves(x, {r, d}), floats(weight, {d}), floats(bias, {d}), halves(out, {r, d}),
                 floats(moments, {r, 2}), r, d, epsilon, at::get_num_threads());
    return {out, moments};
}

static tuple<Tensor, Tensor, Tensor> apply_layer_norm_backward(const Tensor &x, const Tensor &gradient,
                                                               const Tensor &weight, const Tensor &moments) {
    int64_t r = x.size(0), d = x.size(1);
    Tensor to_x = at::empty_like(x), to_weight = new_floats({d}), to_bias = new_floats({d});
    Scratch scratch(norm_scratch(d));
    norm_backward(halves(x, {r, d}), halves(gradient, {r, d}), floats(weight, {d}), floats(moments, {r, 2}), 0,
                  halves(to_x, {r, d}), floats(to_weight, {d}), floats(to_bias, {d}), r, d, scratch.floats(),
                  at::get_num_threads());
    return {to_x, to_weight, to_bias};
}

/* The parameters of a branch, or their gradients: layer norm, first and second linear layer. */
struct Parameters {
    int64_t first, second; /* outputs of the first linear layer, inputs of the second */
    float *gain, *offset, *bias, *bias2;
    Weight weight, weight2;

    Parameters(at::TensorList all, int64_t branch, int64_t d, int64_t heads) {
        const Tensor *p = &all[6 * branch];
        first = heads ? 3 * d : p[3].size(0), second = heads ? d : first;
        check_widths({first, second, d});
        if (heads) head_width(d, heads);
        gain = floats(p[0], {d}), offset = floats(p[1], {d});
        weight = weight_of(p[2], first, d), bias = floats(p[3], {first});
        weight2 = weight_of(p[4], d, second), bias2 = floats(p[5], {d});
    }
};

/* The results of a branch: its output, the normalised input and its moments; queries, keys and values or the slopes of
 * GELU; the input of the second linear layer, and the norms of attention. */
struct Kept {
    bf16 *out, *normed, *between, *hidden;
    float *moments, *norms;

    static vector<Tensor> create(int64_t b, int64_t t, int64_t d, int64_t heads, const Parameters &by) {
        return {new_halves({b, t, d}),        new_halves({b, t, d}),         new_floats({b, t, 2}),
                new_halves({b, t, by.first}), new_halves({b, t, by.second}), new_floats({b, heads, t, 2})};
    }

    Kept(at::TensorList all, int64_t branch, int64_t b, int64_t t, int64_t d, int64_t heads, const Parameters &by) {
        const Tensor *k = &all[6 * branch];
        out = halves(k[0], {b, t, d}), normed = halves(k[1], {b, t, d}), moments = floats(k[2], {b, t, 2});
        between = halves(k[3], {b, t, by.first}), hidden = halves(k[4], {b, t, by.second});
        norms = floats(k[5], {b, heads, t, 2});
    }
};

static int64_t branch_scratch(const Parameters &by, int64_t t, int64_t d, int64_t heads, int threads) {
    int64_t most = std::max({norm_scratch(d), linear_scratch(d, by.first), linear_scratch(by.second, d),
                             linear_weights_scratch(std::max(d, by.second), threads)});
    return heads ? std::max(most, attention_scratch(t, t, d / heads, threads)) : most;
}

static vector<Tensor> apply_branches(const Tensor &x, at::TensorList weights, Sizes heads, double epsilon, bool adds,
                                     bool learns) {
    int64_t b = x.size(0), t = x.size(1), d = x.size(2), rows = b * t;
    int threads = at::get_num_threads();
    TORCH_CHECK(weights.size() == 6 * heads.size() && (adds || heads.size() == 1));
    vector<Tensor> kept;
    const bf16 *in = halves(x, {b, t, d});
    for (size_t n = 0; n < heads.size(); n++) {
        int64_t h = heads[n];
        Parameters by(weights, n, d, h);
        Scratch scratch(branch_scratch(by, t, d, h, threads));
        vector<Tensor> created = Kept::create(b, t, d, h, by);
        Kept keep(created, 0, b, t, d, h, by);
        norm_forward(in, by.gain, by.offset, keep.normed, keep.moments, rows, d, epsilon, threads);
        linear(keep.normed, by.weight, by.bias, 0, h ? keep.between : keep.hidden, h || !learns ? 0 : keep.between, !h,
               rows, d, by.first, scratch.pairs(), threads);
        if (h)
            attention(keep.between, by.first, keep.between + d, keep.between + 2 * d, by.first, keep.hidden,
                      keep.norms, b, h, t, t, d / h, scratch.pairs(), threads);
        linear(keep.hidden, by.weight2, by.bias2, adds ? in : 0, keep.out, 0, false, rows, by.second, d,
               scratch.pairs(), threads);
        in = keep.out;
        if (!learns) kept.clear(), created.resize(1);
        kept.insert(kept.end(), created.begin(), created.end());
    }
    return kept;
}

static vector<Tensor> apply_branches_backward(const Tensor &gradient, const Tensor &x, at::TensorList weights,
                                              at::TensorList kept, Sizes heads, bool adds) {
    int64_t b = x.size(0), t = x.size(1), d = x.size(2), rows = b * t;
    int threads = at::get_num_threads();
    TORCH_CHECK(weights.size() == 6 * heads.size() && kept.size() == weights.size());
    vector<Tensor> to = {at::empty_like(x)};
    for (const Tensor &weight : weights) {
        TORCH_CHECK(weight.dim() < 3, "expected weights that are not packed");
        to.push_back(at::empty_like(weight));
    }
    at::TensorList to_weights(to.data() + 1, weights.size());
    Tensor narrow = new_halves({b, t, d}), passed = new_halves({b, t, d});
    const bf16 *in = halves(gradient, {b, t, d});
    for (int64_t n = (int64_t)heads.size() - 1; n >= 0; n--) {
        int64_t h = heads[n];
        Parameters by(weights, n, d, h), out(to_weights, n, d, h);
        Kept keep(kept, n, b, t, d, h, by);
        Scratch scratch(branch_scratch(by, t, d, h, threads));
        Tensor wide = new_halves({b, t, by.first});
        bf16 *inner = halves(narrow, {b, t, d}), *outer = halves(wide, {b, t, by.first});
        linear_weights(in, keep.hidden, out.weight2.values, out.bias2, rows, by.second, d, scratch.pairs(), threads);
        linear_inputs(in, by.weight2.values, h ? 0 : keep.between, h ? inner : outer, rows, by.second, d,
                      scratch.pairs(), threads);
        if (h)
            attention_backward(keep.between, by.first, keep.between + d, keep.between + 2 * d, by.first, inner,
                               keep.norms, outer, outer + d, outer + 2 * d, b, h, t, t, d / h, scratch.pairs(),
                               threads);
        linear_weights(outer, keep.normed, out.weight.values, out.bias, rows, d, by.first, scratch.pairs(), threads);
        linear_inputs(outer, by.weight.values, 0, inner, rows, d, by.first, scratch.pairs(), threads);
        /* In place if the input is added: each value is read before it is written. */
        bf16 *to_in = halves(n ? passed : to[0], {b, t, d});
        norm_backward(halves(n ? kept[6 * (n - 1)] : x, {b, t, d}), inner, by.gain, keep.moments, adds ? in : 0, to_in,
                      out.gain, out.offset, rows, d, scratch.floats(), threads);
        in = to_in;
    }
    return to;
}

#define REGISTER(NAME, LIBRARY) TORCH_LIBRARY(NAME, LIBRARY)

REGISTER(TORCH_EXTENSION_NAME, library) {
#ifdef __AMX_BF16__
    syscall(SYS_arch_prctl, 0x1023, 18); /* ask Linux for tiles: ARCH_REQ_XCOMP_PERM, XTILEDATA */
#endif
    library.def("pack(Tensor weight) -> Tensor", apply_pack);
    library.def("linear(Tensor x, Tensor weight, Tensor bias) -> Tensor", apply_linear);
    library.def("linear_inputs(Tensor gradient, Tensor weight) -> Tensor", apply_linear_inputs);
    library.def("linear_weights(Tensor gradient, Tensor x) -> (Tensor, Tensor)", apply_linear_weights);
    library.def("attention(Tensor? query, Tensor packed, int heads) -> (Tensor, Tensor)", apply_attention);
    library.def("attention_backward(Tensor? query, Tensor packed, Tensor gradient, Tensor norms) -> Tensor[]",
                apply_attention_backward);
    library.def("rotate(Tensor x, Tensor angles, int rotated, bool back) -> Tensor", apply_rotate);
    library.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float epsilon) -> (Tensor, Tensor)",
                apply_layer_norm);
    library.def("layer_norm_backward(Tensor x, Tensor gradient, Tensor weight, Tensor moments) -> "
                "(Tensor, Tensor, Tensor)", apply_layer_norm_backward);
    library.def("branches(Tensor x, Tensor[] weights, int[] heads, float epsilon, bool adds, bool learns) -> Tensor[]",
                apply_branches);
    library.def("branches_backward(Tensor gradient, Tensor x, Tensor[] weights, Tensor[] kept, int[] heads, "
                "bool adds) -> Tensor[]", apply_branches_backward);
}
