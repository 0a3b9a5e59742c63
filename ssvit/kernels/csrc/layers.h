/* Functions that are shared between C files, run on `threads` threads; documented in kernels/operators.py. */

#ifndef LAYERS_H
#define LAYERS_H

#include "numbers.h"

void norm_forward(const bf16 *inputs, const float *weight, const float *bias, bf16 *out, float *moments, int64_t rows,
                  int64_t width, float epsilon, int threads);
void norm_backward(const bf16 *inputs, const bf16 *gradient, const float *weight, const float *moments,
                   const bf16 *added, bf16 *out, float *to_weight, float *to_bias, float *sums, int64_t rows,
                   int64_t width, int64_t blocks, int threads);

/* The following functions exist only if the processor supports products.h. */

void linear(const bf16 *x, const float *weight, const float *bias, const bf16 *added, bf16 *out, bf16 *slopes,
            int64_t with_gelu, int64_t rows, int64_t inputs, int64_t outputs, pair *strips, int threads);
void linear_inputs(const bf16 *gradient, const float *weight, const bf16 *slopes, bf16 *out, int64_t rows,
                   int64_t inputs, int64_t outputs, pair *strips, int threads);
void linear_weights(const bf16 *gradient, const bf16 *x, float *to_weight, float *to_bias, int64_t rows, int64_t inputs,
                    int64_t outputs, pair *scratch, int threads);

void attention(const bf16 *query, int64_t query_stride, const bf16 *key, const bf16 *value, int64_t stride, bf16 *out,
               float *norms, int64_t images, int64_t heads, int64_t q, int64_t t, int64_t width, float scale,
               pair *scratch, int threads);
void attention_backward(const bf16 *query, int64_t query_stride, const bf16 *key, const bf16 *value, int64_t stride,
                        const bf16 *gradient, const float *norms, bf16 *to_query, bf16 *to_key, bf16 *to_value,
                        int64_t images, int64_t heads, int64_t q, int64_t t, int64_t width, float scale, pair *scratch,
                        int threads);

#endif
