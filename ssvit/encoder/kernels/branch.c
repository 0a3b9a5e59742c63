/* A whole branch of a Transformer's layer, and its gradients: the kernels of the other files, one after the other,
 * without the way through Python in between. kernels/__init__.py says what is computed.
 */

#include "products.h"

#ifdef PRODUCTS_H

#include "layers.h"

/* between: the packed queries, keys and values, or without heads GELU's slopes, if they are kept. */
void branch(const bf16 *x, const float *gain, const float *offset, const float *weight, const float *bias,
            const float *weight2, const float *bias2, bf16 *out, bf16 *normed, float *moments, bf16 *between,
            bf16 *hidden, float *norms, int64_t images, int64_t tokens, int64_t width, int64_t first, int64_t second,
            int64_t heads, int64_t adds, float epsilon, float scale, pair *scratch, int threads) {
    int64_t rows = images * tokens;
    norm_forward(x, gain, offset, normed, moments, rows, width, epsilon, threads);
    if (heads) {
        linear(normed, weight, bias, 0, between, 0, 0, rows, width, first, scratch, threads);
        attention(between, first, between + width, between + 2 * width, first, hidden, norms, images, heads, tokens,
                  tokens, width / heads, scale, scratch, threads);
    } else {
        linear(normed, weight, bias, 0, hidden, between, 1, rows, width, first, scratch, threads);
    }
    linear(hidden, weight2, bias2, adds ? x : 0, out, 0, 0, rows, second, width, scratch, threads);
}

/* wide, narrow: scratch memory of (rows, first) and (rows, width). */
void branch_backward(const bf16 *gradient, const bf16 *x, const float *gain, const float *weight, const float *weight2,
                     const bf16 *normed, const float *moments, const bf16 *between, const bf16 *hidden,
                     const float *norms, bf16 *to_x, float *to_gain, float *to_offset, float *to_weight, float *to_bias,
                     float *to_weight2, float *to_bias2, bf16 *wide, bf16 *narrow, int64_t images, int64_t tokens,
                     int64_t width, int64_t first, int64_t second, int64_t heads, int64_t adds, int64_t blocks,
                     float scale, pair *scratch, int threads) {
    int64_t rows = images * tokens;
    linear_weights(gradient, hidden, to_weight2, to_bias2, rows, second, width, scratch, threads);
    if (heads) {
        linear_inputs(gradient, weight2, 0, narrow, rows, second, width, scratch, threads);
        attention_backward(between, first, between + width, between + 2 * width, first, narrow, norms, wide,
                           wide + width, wide + 2 * width, images, heads, tokens, tokens, width / heads, scale, scratch,
                           threads);
    } else {
        linear_inputs(gradient, weight2, between, wide, rows, second, width, scratch, threads);
    }
    linear_weights(wide, normed, to_weight, to_bias, rows, width, first, scratch, threads);
    linear_inputs(wide, weight, 0, narrow, rows, width, first, scratch, threads);
    norm_backward(x, narrow, gain, moments, adds ? gradient : 0, to_x, to_gain, to_offset, (float *)scratch, rows,
                  width, blocks, threads);
}

#endif
