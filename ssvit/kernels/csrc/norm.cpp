/* Layer norm in bfloat16: each row is read once, computed in float32 and rounded once. Results do not depend on the
 * number of threads. */

#include "layers.h"

#include <math.h>

#define BLOCKS 32 /* blocks of rows whose gradients of weight and bias are summed separately, for threads */

int64_t norm_scratch(int64_t width) { return BLOCKS * 2 * width; }

void norm_forward(const bf16 *inputs, const float *weight, const float *bias, bf16 *out, float *moments, int64_t rows,
                  int64_t width, float epsilon, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const bf16 *x = inputs + i * width;
        /* Compute both sums in one pass, shifted by the first value. Its distance to the mean is at most sqrt(width)
         * deviations, so the relative error is at most width times that of float32. */
        float first = as_float(x[0]), sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum, squares)
        for (int64_t j = 0; j < width; j++) {
            float each = as_float(x[j]) - first;
            sum += each, squares += each * each;
        }
        float m = sum / width, s = 1 / sqrtf(squares / width - m * m + epsilon);
        m += first;
#pragma omp simd
        for (int64_t j = 0; j < width; j++)
            out[i * width + j] = as_bf16((as_float(x[j]) - m) * s * weight[j] + bias[j]);
        moments[2 * i] = m, moments[2 * i + 1] = s;
    }
}

/* added: rows that are added to the gradient of x, or 0. */
void norm_backward(const bf16 *inputs, const bf16 *gradient, const float *weight, const float *moments,
                   const bf16 *added, bf16 *out, float *to_weight, float *to_bias, int64_t rows, int64_t width,
                   float *sums, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t block = 0; block < BLOCKS; block++) {
        float *for_weight = sums + block * 2 * width, *for_bias = for_weight + width;
        memset(for_weight, 0, 2 * width * sizeof *sums);
        for (int64_t i = block * rows / BLOCKS; i < (block + 1) * rows / BLOCKS; i++) {
            const bf16 *x = inputs + i * width, *g = gradient + i * width;
            float m = moments[2 * i], s = moments[2 * i + 1], along_bias = 0, along_weight = 0;
#pragma omp simd reduction(+ : along_bias, along_weight)
            for (int64_t j = 0; j < width; j++) {
                float normal = (as_float(x[j]) - m) * s, each = as_float(g[j]);
                for_weight[j] += each * normal;
                for_bias[j] += each;
                along_bias += each * weight[j];
                along_weight += each * weight[j] * normal;
            }
            along_bias /= width, along_weight /= width;
            const bf16 *more = added ? added + i * width : 0;
#pragma omp simd
            for (int64_t j = 0; j < width; j++) {
                float normal = (as_float(x[j]) - m) * s, other = more ? as_float(more[j]) : 0;
                float to_x = s * (as_float(g[j]) * weight[j] - along_bias - normal * along_weight);
                out[i * width + j] = as_bf16(to_x + other);
            }
        }
    }
    memset(to_weight, 0, width * sizeof *sums), memset(to_bias, 0, width * sizeof *sums);
    for (int64_t block = 0; block < BLOCKS; block++, sums += 2 * width)
        for (int64_t j = 0; j < width; j++) to_weight[j] += sums[j], to_bias[j] += sums[width + j];
}
