/* Attention in bfloat16, one head at a time; logits and weights are float32, are never written to memory and are
 * recomputed for the gradient (Dao et al. 2022). Results do not depend on the number of threads. */

#include "products.h"

#ifdef PRODUCTS_H

#include "layers.h"

#include <math.h>
#include <omp.h>

#define BLOCK 24 /* queries per block, complete tiles and pairs, so that their logits stay in the L1 cache */

struct whole {
    float *out;
    int64_t width;
};

INLINE void finish_whole(const int vectors, __m512 sums[ROWS][PANEL], int64_t row, int64_t rows, int64_t column,
                         void *to) {
    const struct whole *target = to;
    (void)rows;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(target->out + (row + r) * target->width + column + v * LANES, sums[r][v]);
}

struct rounded {
    bf16 *out;
    int64_t stride;
    const float *norms; /* two values for each row, which is multiplied by the second, or 0 */
};

INLINE void finish_rounded(const int vectors, __m512 sums[ROWS][PANEL], int64_t row, int64_t rows, int64_t column,
                           void *to) {
    const struct rounded *target = to;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors && r < rows; v++)
            store(target->out + (row + r) * target->stride + column + v * LANES,
                  target->norms ? _mm512_mul_ps(sums[r][v], _mm512_set1_ps(target->norms[2 * (row + r) + 1]))
                                : sums[r][v]);
}

/* Return the maximum of t logits, times scale. */
INLINE float largest(const float *row, int64_t t, float scale) {
    int64_t last = (t - 1) / LANES * LANES;
    __m512 found = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), 0xffff >> (last + LANES - t), row + last);
    for (int64_t j = 0; j < last; j += LANES) found = _mm512_max_ps(found, _mm512_loadu_ps(row + j));
    return _mm512_reduce_max_ps(found) * scale;
}

/* Convert the first t of (whole,) logits to weights 2^(scale * logit - shift); return 1 / sum of the weights. */
INLINE float soften(const float *row, int64_t t, int64_t whole, float scale, float shift, bf16 *weights) {
    __m512 sum = _mm512_setzero_ps(), scales = _mm512_set1_ps(scale), shifts = _mm512_set1_ps(shift);
    for (int64_t j = 0; j < whole; j += LANES) {
        __mmask16 counts = j + LANES <= t ? 0xffff : 0xffff >> (whole - t);
        __m512 each = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(row + j), scales, shifts));
        each = _mm512_maskz_mov_ps(counts, each);
        store(weights + j, each);
        sum = _mm512_add_ps(sum, each);
    }
    return 1 / _mm512_reduce_add_ps(sum);
}

/* Recompute the weights from the norms of `soften`. Columns beyond the last get arbitrary finite weights. */
INLINE __m512 share(__m512 logits, __m512 scale, __m512 largest, __m512 rest) {
    __m512 power = _mm512_min_ps(_mm512_setzero_ps(), _mm512_fmsub_ps(logits, scale, largest));
    return _mm512_mul_ps(power_of_two(power), rest);
}

/* Interleave two rows to pairs. */
INLINE __m512i pairs_of(__m512 one, __m512 two) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(two, one));
}

/* From two rows of logits and of the gradients of their weights, each (2, whole), compute the weights, as pairs, and
 * the gradients of the logits, weight * (gradient - sum of weight * gradient) * scale, as pairs and as rows. */
INLINE void slopes_of(float *logits, const float *gradients, const float *norm, const float *other, int64_t whole,
                      float scale, pair *weights, pair *slopes, bf16 *rows) {
    __m512 one = _mm512_setzero_ps(), two = one, scales = _mm512_set1_ps(scale * LOG2_E);
    __m512 largest_one = _mm512_set1_ps(norm[0]), largest_two = _mm512_set1_ps(other[0]);
    __m512 rest_one = _mm512_set1_ps(norm[1]), rest_two = _mm512_set1_ps(other[1]);
    for (int64_t j = 0; j < whole; j += LANES) {
        __m512 a = share(_mm512_loadu_ps(logits + j), scales, largest_one, rest_one);
        __m512 b = share(_mm512_loadu_ps(logits + whole + j), scales, largest_two, rest_two);
        one = _mm512_fmadd_ps(a, _mm512_loadu_ps(gradients + j), one);
        two = _mm512_fmadd_ps(b, _mm512_loadu_ps(gradients + whole + j), two);
        _mm512_storeu_ps(logits + j, a), _mm512_storeu_ps(logits + whole + j, b);
        _mm512_storeu_si512(weights + j, pairs_of(a, b));
    }
    one = _mm512_set1_ps(_mm512_reduce_add_ps(one)), two = _mm512_set1_ps(_mm512_reduce_add_ps(two));
    scales = _mm512_set1_ps(scale);
    for (int64_t j = 0; j < whole; j += LANES) {
        __m512 a = _mm512_mul_ps(scales, _mm512_sub_ps(_mm512_loadu_ps(gradients + j), one));
        __m512 b = _mm512_mul_ps(scales, _mm512_sub_ps(_mm512_loadu_ps(gradients + whole + j), two));
        a = _mm512_mul_ps(a, _mm512_loadu_ps(logits + j)), b = _mm512_mul_ps(b, _mm512_loadu_ps(logits + whole + j));
        store(rows + j, a), store(rows + whole + j, b);
        _mm512_storeu_si512(slopes + j, pairs_of(a, b));
    }
}

/* Return the offset from one head to the next, in rows that contain the heads of an image. */
INLINE int64_t next(int64_t head, int64_t heads, int64_t width, int64_t rows, int64_t stride) {
    return head + 1 < heads ? width : rows * stride - head * width;
}

/* Return the number of pairs of scratch memory per thread. */
int64_t attention_scratch(int64_t q, int64_t t, int64_t width) {
    int64_t whole = up(t, LANES), half = (q + 1) / 2;
    return up(3 * whole * width / 2 + 2 * half * width + 2 * half * whole + 2 * BLOCK * whole + BLOCK * whole / 2,
              LANES);
}

void attention(const bf16 *query, int64_t query_stride, const bf16 *key, const bf16 *value, int64_t stride, bf16 *out,
               float *norms, int64_t images, int64_t heads, int64_t q, int64_t t, int64_t width, float scale,
               pair *scratch, int threads) {
    int64_t whole = up(t, LANES), each = attention_scratch(q, t, width);
    scale *= LOG2_E;
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int64_t image = 0; image < images; image++)
        for (int64_t head = 0; head < heads; head++) {
            const bf16 *asking = query + image * q * query_stride + head * width;
            const bf16 *keys = key + image * t * stride + head * width,
                       *values = value + image * t * stride + head * width;
            int64_t further = next(head, heads, width, t, stride), asked = next(head, heads, width, q, query_stride);
            bf16 *to = out + (image * q * heads + head) * width;
            float *kept = norms + (image * heads + head) * q * 2;

            pair *turned = scratch + omp_get_thread_num() * each, *coupled = turned + whole * width / 2;
            float *logits = (float *)(coupled + whole * width / 2);
            bf16 *weights = (bf16 *)(logits + BLOCK * whole);
            turn(keys, stride, t, width / 2, turned);
            couple(values, stride, t, width, coupled);
            for (int64_t i = 0; i < q; i += BLOCK) {
                int64_t n = least(BLOCK, q - i);
                struct whole block = {logits, whole};
                multiply((const pair *)(asking + i * query_stride), query_stride / 2, 1, n, turned, width / 2,
                         whole / LANES, 0, finish_whole, &block);
                float *norm = kept + 2 * i;
                for (int64_t r = 0; r < n; r++) norm[2 * r] = largest(logits + r * whole, t, scale);
                for (int64_t r = 0; r < n; r++)
                    norm[2 * r + 1] = soften(logits + r * whole, t, whole, scale, norm[2 * r], weights + r * whole);
                fetch(asking + asked, query_stride, i, i + n, width);
                fetch(keys + further, stride, i * t / q, (i + n) * t / q, width);
                fetch(values + further, stride, i * t / q, (i + n) * t / q, width);
                struct rounded rows = {to + i * heads * width, heads * width, norm};
                multiply((pair *)weights, whole / 2, 1, n, coupled, (t + 1) / 2, width / LANES, 0, finish_rounded,
                         &rows);
            }
        }
}

void attention_backward(const bf16 *query, int64_t query_stride, const bf16 *key, const bf16 *value, int64_t stride,
                        const bf16 *gradient, const float *norms, bf16 *to_query, bf16 *to_key, bf16 *to_value,
                        int64_t images, int64_t heads, int64_t q, int64_t t, int64_t width, float scale, pair *scratch,
                        int threads) {
    int64_t whole = up(t, LANES), half = (q + 1) / 2, each = attention_scratch(q, t, width), back = heads * width;
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int64_t image = 0; image < images; image++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t at = image * t * stride + head * width, at_query = image * q * query_stride + head * width;
            const bf16 *asking = query + at_query, *keys = key + at, *values = value + at;
            const bf16 *changes = gradient + (image * q * heads + head) * width;
            int64_t further = next(head, heads, width, t, stride);
            const float *kept = norms + (image * heads + head) * q * 2;

            pair *turned_keys = scratch + omp_get_thread_num() * each, *turned_values = turned_keys + whole * width / 2;
            pair *coupled_keys = turned_values + whole * width / 2, *coupled_queries = coupled_keys + whole * width / 2;
            pair *coupled_changes = coupled_queries + half * width, *weights = coupled_changes + half * width;
            pair *slopes = weights + half * whole;
            float *shares = (float *)(slopes + half * whole), *towards = shares + BLOCK * whole;
            bf16 *rows = (bf16 *)(towards + BLOCK * whole);
            turn(keys, stride, t, width / 2, turned_keys);
            turn(values, stride, t, width / 2, turned_values);
            couple(keys, stride, t, width, coupled_keys);
            couple(asking, query_stride, q, width, coupled_queries);
            couple(changes, back, q, width, coupled_changes);
            for (int64_t i = 0; i < q; i += BLOCK) {
                int64_t n = least(BLOCK, q - i);
                struct whole logits = {shares, whole}, products = {towards, whole};
                multiply((const pair *)(asking + i * query_stride), query_stride / 2, 1, n, turned_keys, width / 2,
                         whole / LANES, 0, finish_whole, &logits);
                multiply((const pair *)(changes + i * back), back / 2, 1, n, turned_values, width / 2, whole / LANES, 0,
                         finish_whole, &products);
                for (int64_t r = 0; r < n; r += 2) {
                    /* An odd last row is paired with zeros. */
                    const float *norm = kept + 2 * (i + r), *other = r + 1 < n ? norm + 2 : (float[]){0, 0};
                    int64_t place = (i + r) / 2 * whole, row = r * whole;
                    slopes_of(shares + row, towards + row, norm, other, whole, scale, weights + place, slopes + place,
                              rows + row);
                }
                fetch(asking + next(head, heads, width, q, query_stride), query_stride, i, i + n, width);
                fetch(changes + next(head, heads, width, q, back), back, i, i + n, width);
                fetch(keys + further, stride, i * t / q, (i + n) * t / q, width);
                fetch(values + further, stride, i * t / q, (i + n) * t / q, width);
                struct rounded out = {to_query + at_query + i * query_stride, query_stride, 0};
                multiply((pair *)rows, whole / 2, 1, n, coupled_keys, (t + 1) / 2, width / LANES, 0, finish_rounded,
                         &out);
            }
            struct rounded keys_out = {to_key + at, stride, 0}, values_out = {to_value + at, stride, 0};
            multiply(slopes, 1, whole, t, coupled_queries, half, width / LANES, 0, finish_rounded, &keys_out);
            multiply(weights, 1, whole, t, coupled_changes, half, width / LANES, 0, finish_rounded, &values_out);
        }
}

#endif
