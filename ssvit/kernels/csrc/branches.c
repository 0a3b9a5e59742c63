/* Branches of a Transformer's layers and their gradients, computed by the kernels of these files without returning to
 * Python; documented in kernels/operators.py. */

#include "products.h"

#ifdef PRODUCTS_H

#include <math.h>

#include "layers.h"

struct parameters {
    float *gain, *offset, *weight, *bias, *weight2, *bias2;
};

/* between: the packed queries, keys and values, or without heads the slopes of GELU, if required. */
struct kept {
    bf16 *out, *normed;
    float *moments;
    bf16 *between, *hidden;
    float *norms;
};

/* first: outputs of the first linear layer; second: inputs of the second. */
struct sizes {
    int64_t first, second, heads;
};

static float scale(int64_t width) { return 1 / sqrt((double)width); }

void branches(const bf16 *x, const struct parameters *weights, const struct kept *kept, const struct sizes *sizes,
              int64_t count, int64_t images, int64_t tokens, int64_t width, int64_t adds, float epsilon, pair *scratch,
              int threads) {
    int64_t rows = images * tokens;
    for (int64_t n = 0; n < count; x = kept[n++].out) {
        struct parameters by = weights[n];
        struct kept keep = kept[n];
        int64_t first = sizes[n].first, second = sizes[n].second, heads = sizes[n].heads;
        norm_forward(x, by.gain, by.offset, keep.normed, keep.moments, rows, width, epsilon, threads);
        if (heads) {
            linear(keep.normed, by.weight, by.bias, 0, keep.between, 0, 0, rows, width, first, scratch, threads);
            attention(keep.between, first, keep.between + width, keep.between + 2 * width, first, keep.hidden,
                      keep.norms, images, heads, tokens, tokens, width / heads, scale(width / heads), scratch, threads);
        } else {
            linear(keep.normed, by.weight, by.bias, 0, keep.hidden, keep.between, 1, rows, width, first, scratch,
                   threads);
        }
        linear(keep.hidden, by.weight2, by.bias2, adds ? x : 0, keep.out, 0, 0, rows, second, width, scratch, threads);
    }
}

/* wide, narrow: scratch memory of shape (rows, maximum of `first`) and (2, rows, width). */
void branches_backward(const bf16 *gradient, const bf16 *x, const struct parameters *weights, const struct kept *kept,
                       const struct parameters *gradients, const struct sizes *sizes, int64_t count, int64_t images,
                       int64_t tokens, int64_t width, int64_t adds, int64_t blocks, bf16 *to_x, bf16 *wide,
                       bf16 *narrow, pair *scratch, int threads) {
    int64_t rows = images * tokens;
    bf16 *passed = narrow + rows * width; /* gradient, from one branch to the previous one */
    for (int64_t n = count - 1; n >= 0; n--) {
        struct parameters by = weights[n];
        struct kept keep = kept[n];
        struct parameters to = gradients[n];
        int64_t first = sizes[n].first, second = sizes[n].second, heads = sizes[n].heads;
        linear_weights(gradient, keep.hidden, to.weight2, to.bias2, rows, second, width, scratch, threads);
        if (heads) {
            linear_inputs(gradient, by.weight2, 0, narrow, rows, second, width, scratch, threads);
            attention_backward(keep.between, first, keep.between + width, keep.between + 2 * width, first, narrow,
                               keep.norms, wide, wide + width, wide + 2 * width, images, heads, tokens, tokens,
                               width / heads, scale(width / heads), scratch, threads);
        } else {
            linear_inputs(gradient, by.weight2, keep.between, wide, rows, second, width, scratch, threads);
        }
        linear_weights(wide, keep.normed, to.weight, to.bias, rows, width, first, scratch, threads);
        linear_inputs(wide, by.weight, 0, narrow, rows, width, first, scratch, threads);
        /* In place if the input is added: each value is read before it is written. */
        bf16 *out = n ? passed : to_x;
        norm_backward(n ? kept[n - 1].out : x, narrow, by.gain, keep.moments, adds ? gradient : 0, out, to.gain,
                      to.offset, (float *)scratch, rows, width, blocks, threads);
        gradient = out;
    }
}

#endif
