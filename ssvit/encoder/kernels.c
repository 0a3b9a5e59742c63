/* What stands between the matrix products of a layer, in bfloat16 on a CPU. Each kernel reads its tensors once, computes
 * in float32 and rounds once; kernels.py builds and calls them, and says what they compute. Results do not depend on
 * the number of threads.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define VECTOR 16

typedef uint16_t bf16;

static inline float as_float(bf16 half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest, ties to even. */
static inline bf16 as_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

/* e^x for x <= 0, to 1e-5 relative: 2^n times a polynomial of what is left, written out so that compilers vectorise it.
 * What is not a number stays so. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(x * 1.44269504f), rest = x - n * 0.693147181f;
    float power = 1 + rest * (1 + rest * (0.5f + rest * (0.166666667f + rest * (0.0416666667f + rest * 0.00833333333f))));
    uint32_t bits;
    memcpy(&bits, &power, sizeof bits);
    bits += (uint32_t)(int32_t)n << 23;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* Softmax of scale * row, in place: (rows, columns). The copy of a row is filled up to whole vectors, since what is left
 * of one would be computed number by number. */
void softmax(bf16 *logits, int64_t rows, int64_t columns, float scale, int threads) {
    int64_t whole = (columns + VECTOR - 1) / VECTOR * VECTOR;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        bf16 *row = logits + i * columns;
        float shares[whole], largest = -INFINITY, sum = 0;
        for (int64_t j = columns; j < whole; j++) shares[j] = -INFINITY;
        for (int64_t j = 0; j < columns; j++) shares[j] = scale * as_float(row[j]);
#pragma omp simd reduction(max : largest)
        for (int64_t j = 0; j < whole; j++) largest = shares[j] > largest ? shares[j] : largest;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < whole; j++) {
            shares[j] = exponential(shares[j] - largest);
            sum += shares[j];
        }
        sum = 1 / sum;
        for (int64_t j = 0; j < columns; j++) row[j] = as_bf16(shares[j] * sum);
    }
}

/* The gradient of the logits from that of the weights, in place: scale * w * (g - sum(w * g)). */
void softmax_backward(const bf16 *weights, bf16 *gradient, int64_t rows, int64_t columns, float scale, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const bf16 *w = weights + i * columns;
        bf16 *g = gradient + i * columns;
        float mean = 0;
#pragma omp simd reduction(+ : mean)
        for (int64_t j = 0; j < columns; j++) mean += as_float(w[j]) * as_float(g[j]);
        for (int64_t j = 0; j < columns; j++) g[j] = as_bf16(scale * as_float(w[j]) * (as_float(g[j]) - mean));
    }
}

/* Packed (images, tokens, parts, heads, width) -> (parts, images, heads, tokens, width). */
void gather_heads(const bf16 *packed, bf16 *apart, int64_t images, int64_t tokens, int64_t parts, int64_t heads,
                  int64_t width, int threads) {
#pragma omp parallel for collapse(3) num_threads(threads)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t image = 0; image < images; image++)
            for (int64_t head = 0; head < heads; head++)
                for (int64_t token = 0; token < tokens; token++)
                    memcpy(apart + (((part * images + image) * heads + head) * tokens + token) * width,
                           packed + (((image * tokens + token) * parts + part) * heads + head) * width,
                           width * sizeof *apart);
}

/* The way back. */
void scatter_heads(const bf16 *apart, bf16 *packed, int64_t images, int64_t tokens, int64_t parts, int64_t heads,
                   int64_t width, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int64_t image = 0; image < images; image++)
        for (int64_t token = 0; token < tokens; token++)
            for (int64_t part = 0; part < parts; part++)
                for (int64_t head = 0; head < heads; head++)
                    memcpy(packed + (((image * tokens + token) * parts + part) * heads + head) * width,
                           apart + (((part * images + image) * heads + head) * tokens + token) * width,
                           width * sizeof *packed);
}

/* The gradient of x (rows, width) from that of gelu(x): gradient * (Phi(x) + x * phi(x)), with the normal distribution's
 * Phi to 1e-7 (Abramowitz and Stegun, 7.1.26). sums: (blocks, width), its sums over as many equal shares of the rows. */
void gelu_backward(const bf16 *inputs, const bf16 *gradient, bf16 *out, float *sums, int64_t rows, int64_t width,
                   int64_t blocks, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        float *sum = sums + block * width;
        memset(sum, 0, width * sizeof *sum);
        for (int64_t i = block * rows / blocks * width; i < (block + 1) * rows / blocks * width; i += width) {
#pragma omp simd
            for (int64_t j = 0; j < width; j++) {
                float x = as_float(inputs[i + j]), bell = exponential(-0.5f * x * x);
                float t = 1 / (1 + 0.231641888f * __builtin_fabsf(x));
                float series = -0.142248368f + t * (0.710706871f + t * (-0.726576014f + t * 0.530702715f));
                float tail = bell * t * (0.127414796f + t * series);
                float slope = (x < 0 ? tail : 1 - tail) + 0.398942280f * x * bell, each = as_float(gradient[i + j]) * slope;
                sum[j] += each;
                out[i + j] = as_bf16(each);
            }
        }
    }
}

void norm_forward(const bf16 *inputs, const float *weight, const float *bias, bf16 *out, float *mean, float *scale,
                  int64_t rows, int64_t width, float epsilon, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const bf16 *x = inputs + i * width;
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < width; j++) sum += as_float(x[j]);
        float m = sum / width;
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < width; j++) squares += (as_float(x[j]) - m) * (as_float(x[j]) - m);
        float s = 1 / sqrtf(squares / width + epsilon);
#pragma omp simd
        for (int64_t j = 0; j < width; j++) out[i * width + j] = as_bf16((as_float(x[j]) - m) * s * weight[j] + bias[j]);
        mean[i] = m, scale[i] = s;
    }
}

/* sums: (blocks, 2, width), the gradients of weight and bias from as many equal shares of the rows. */
void norm_backward(const bf16 *inputs, const bf16 *gradient, const float *weight, const float *mean, const float *scale,
                   bf16 *out, float *sums, int64_t rows, int64_t width, int64_t blocks, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        float *to_weight = sums + block * 2 * width, *to_bias = to_weight + width;
        memset(to_weight, 0, 2 * width * sizeof *to_weight);
        for (int64_t i = block * rows / blocks; i < (block + 1) * rows / blocks; i++) {
            const bf16 *x = inputs + i * width, *g = gradient + i * width;
            float m = mean[i], s = scale[i], along_bias = 0, along_weight = 0;
#pragma omp simd reduction(+ : along_bias, along_weight)
            for (int64_t j = 0; j < width; j++) {
                float normal = (as_float(x[j]) - m) * s, each = as_float(g[j]);
                to_weight[j] += each * normal;
                to_bias[j] += each;
                along_bias += each * weight[j];
                along_weight += each * weight[j] * normal;
            }
            along_bias /= width, along_weight /= width;
#pragma omp simd
            for (int64_t j = 0; j < width; j++) {
                float normal = (as_float(x[j]) - m) * s;
                out[i * width + j] = as_bf16(s * (as_float(g[j]) * weight[j] - along_bias - normal * along_weight));
            }
        }
    }
}
