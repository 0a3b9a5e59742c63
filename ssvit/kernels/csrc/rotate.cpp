/* Rotation of queries and keys in bfloat16: read once, computed in float32 and rounded once. */

#include "layers.h"

/* Rotate the channels j and half + j of each head in the first `rotated` channels of a row, and copy the rest.
 * angles: cosines of all rows, then sines, (2, rows of angles, half); row i has those of i % `rows of angles`.
 * sign: -1 for the inverse, which is also the gradient. */
void rotate(const bf16 *x, const float *angles, int64_t angle_rows, float sign, bf16 *out, int64_t rows, int64_t width,
            int64_t rotated, int64_t half, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const float *cosine = angles + i % angle_rows * half, *sine = cosine + angle_rows * half;
        const bf16 *from = x + i * width;
        bf16 *to = out + i * width;
        for (int64_t head = 0; head < rotated; head += 2 * half) {
            const bf16 *first = from + head, *second = first + half;
            bf16 *to_first = to + head, *to_second = to_first + half;
#pragma omp simd
            for (int64_t j = 0; j < half; j++) {
                float a = as_float(first[j]), b = as_float(second[j]), s = sign * sine[j];
                to_first[j] = as_bf16(a * cosine[j] - b * s);
                to_second[j] = as_bf16(b * cosine[j] + a * s);
            }
        }
        memcpy(to + rotated, from + rotated, (width - rotated) * sizeof *x);
    }
}
