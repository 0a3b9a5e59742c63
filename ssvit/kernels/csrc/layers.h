/* Functions that are shared between the files, run on `threads` threads; documented in kernels/operators.py.
 * `*_scratch` returns the number of pairs of scratch memory, which begins at a cache line. */

#ifndef LAYERS_H
#define LAYERS_H

#include "numbers.h"

void norm_forward(const bf16 *inputs, const float *weight, const float *bias, bf16 *out, float *moments, int64_t rows,
                  int64_t width, float epsilon, int threads);
int64_t norm_scratch(int64_t width);
void norm_backward(const bf16 *inputs, const bf16 *gradient, const float *weight, const float *moments,
                   const bf16 *added, bf16 *out, float *to_weight, float *to_bias, int64_t rows, int64_t width,
                   float *scratch, int threads);

/* A weight of (outputs, inputs), or its values as `pack` stores them. */
struct Weight {
    float *values;
    const pair *packed;
};

int64_t packed_pairs(int64_t inputs); /* for each output */
void pack(const float *weight, int64_t inputs, int64_t outputs, pair *packed, int threads);
int64_t linear_scratch(int64_t inputs, int64_t outputs);
void linear(const bf16 *x, Weight weight, const float *bias, const bf16 *added, bf16 *out, bf16 *slopes,
            bool with_gelu, int64_t rows, int64_t inputs, int64_t outputs, pair *scratch, int threads);
void linear_inputs(const bf16 *gradient, const float *weight, const bf16 *slopes, bf16 *out, int64_t rows,
                   int64_t inputs, int64_t outputs, pair *scratch, int threads);
int64_t linear_weights_scratch(int64_t inputs, int threads);
void linear_weights(const bf16 *gradient, const bf16 *x, float *to_weight, float *to_bias, int64_t rows, int64_t inputs,
                    int64_t outputs, pair *scratch, int threads);

int64_t attention_scratch(int64_t q, int64_t t, int64_t width, int threads);
void attention(const bf16 *query, int64_t query_stride, const bf16 *key, const bf16 *value, int64_t stride, bf16 *out,
               float *norms, int64_t images, int64_t heads, int64_t q, int64_t t, int64_t width, pair *scratch,
               int threads);
void attention_backward(const bf16 *query, int64_t query_stride, const bf16 *key, const bf16 *value, int64_t stride,
                        const bf16 *gradient, const float *norms, bf16 *to_query, bf16 *to_key, bf16 *to_value,
                        int64_t images, int64_t heads, int64_t q, int64_t t, int64_t width, pair *scratch, int threads);

void rotate(const bf16 *x, const float *angles, int64_t angle_rows, float sign, bf16 *out, int64_t rows, int64_t width,
            int64_t rotated, int64_t half, int threads);

#endif
