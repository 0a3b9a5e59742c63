/* Attention in bfloat16, one head at a time; logits and weights are float32, are never written to memory and are
 * recomputed for the gradient (Dao et al. 2022). Results do not depend on the number of threads. */

#include "layers.h"

#include <math.h>
#include <omp.h>

#include "products.h"

#ifdef __AMX_BF16__
#define QUERIES 32 /* queries per block, complete panels and pairs, so that their logits stay in the L1 cache */
#define WIDTH 32   /* weights of a query are padded to a multiple of this */
#else
#define QUERIES 24
#define WIDTH 16
#endif

INLINE float scale(int64_t width) { return 1 / sqrt((double)width); }

/* Return the maximum of t logits, times scale. */
INLINE float largest(const float *row, int64_t t, float scale) {
    int64_t last = (t - 1) / LANES * LANES;
    __m512 found = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), 0xffff >> (last + LANES - t), row + last);
    for (int64_t j = 0; j < last; j += LANES) found = _mm512_max_ps(found, _mm512_loadu_ps(row + j));
    return _mm512_reduce_max_ps(found) * scale;
}

/* Convert t logits to weights 2^(scale * logit - shift), padded with zeros; return 1 / sum of the weights. */
INLINE float soften(const float *row, int64_t t, int64_t whole, float scale, float shift, bf16 *weights) {
    __m512 sum = _mm512_setzero_ps(), scales = _mm512_set1_ps(scale), shifts = _mm512_set1_ps(shift);
    for (int64_t j = 0; j < t; j += LANES) {
        __mmask16 counts = j + LANES <= t ? 0xffff : 0xffff >> (j + LANES - t);
        __m512 each = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(row + j), scales, shifts), -100);
        each = _mm512_maskz_mov_ps(counts, each);
        store(weights + j, each);
        sum = _mm512_add_ps(sum, each);
    }
    for (int64_t j = up(t, LANES); j < whole; j += LANES) store(weights + j, _mm512_setzero_ps());
    return 1 / _mm512_reduce_add_ps(sum);
}

/* Recompute the weights from the norms of `soften`. Columns beyond the last get arbitrary finite weights. */
INLINE __m512 share(__m512 logits, __m512 scale, __m512 largest, __m512 rest) {
    __m512 power = _mm512_min_ps(_mm512_setzero_ps(), _mm512_fmsub_ps(logits, scale, largest));
    return _mm512_mul_ps(power_of_two(power, -100), rest);
}

/* Interleave two rows to pairs. */
INLINE __m512i pairs_of(__m512 one, __m512 two) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(two, one));
}

/* From two rows of logits and of the gradients of their weights, each (2, whole), compute the weights, as pairs, and
 * the gradients of the logits, weight * (gradient - sum of weight * gradient) * scale, as pairs and as rows, padded
 * with zeros. */
INLINE void slopes_of(float *logits, const float *gradients, const float *norm, const float *other, int64_t t,
                      int64_t whole, float scale, pair *weights, pair *slopes, bf16 *rows) {
    __m512 zero = _mm512_setzero_ps(), one = zero, two = zero, scales = _mm512_set1_ps(scale * LOG2_E);
    __m512 largest_one = _mm512_set1_ps(norm[0]), largest_two = _mm512_set1_ps(other[0]);
    __m512 rest_one = _mm512_set1_ps(norm[1]), rest_two = _mm512_set1_ps(other[1]);
    for (int64_t j = 0; j < t; j += LANES) {
        __m512 a = share(_mm512_loadu_ps(logits + j), scales, largest_one, rest_one);
        __m512 b = share(_mm512_loadu_ps(logits + whole + j), scales, largest_two, rest_two);
        one = _mm512_fmadd_ps(a, _mm512_loadu_ps(gradients + j), one);
        two = _mm512_fmadd_ps(b, _mm512_loadu_ps(gradients + whole + j), two);
        _mm512_storeu_ps(logits + j, a), _mm512_storeu_ps(logits + whole + j, b);
        _mm512_storeu_si512(weights + j, pairs_of(a, b));
    }
    one = _mm512_set1_ps(_mm512_reduce_add_ps(one)), two = _mm512_set1_ps(_mm512_reduce_add_ps(two));
    scales = _mm512_set1_ps(scale);
    for (int64_t j = 0; j < t; j += LANES) {
        __m512 a = _mm512_mul_ps(scales, _mm512_sub_ps(_mm512_loadu_ps(gradients + j), one));
        __m512 b = _mm512_mul_ps(scales, _mm512_sub_ps(_mm512_loadu_ps(gradients + whole + j), two));
        a = _mm512_mul_ps(a, _mm512_loadu_ps(logits + j)), b = _mm512_mul_ps(b, _mm512_loadu_ps(logits + whole + j));
        store(rows + j, a), store(rows + whole + j, b);
        _mm512_storeu_si512(slopes + j, pairs_of(a, b));
    }
    for (int64_t j = up(t, LANES); j < whole; j += LANES) store(rows + j, zero), store(rows + whole + j, zero);
}

/* Return the offset from one head to the next, in rows that contain the heads of an image. */
INLINE int64_t next(int64_t head, int64_t heads, int64_t width, int64_t rows, int64_t stride) {
    return head + 1 < heads ? width : rows * stride - head * width;
}

/* Multiply and round the sums. */
INLINE void multiply_rounded(bf16 *to, int64_t stride, Left left, int64_t rows, const pair *right, int64_t pairs,
                        int64_t vectors) {
    multiply(left, rows, right, pairs, vectors, 0,
             [&](int64_t row, int64_t column, __m512 sums) { store(to + row * stride + column, sums); });
}

/* The scratch memory of a thread. */
struct Scratch {
    pair *turned_keys, *turned_values, *coupled_keys, *coupled_queries, *coupled_changes, *weights, *slopes;
    float *logits, *towards;
    bf16 *rows;
    int64_t size = 0;

    Scratch(pair *from, int64_t q, int64_t t, int64_t width) {
        int64_t whole = up(t, WIDTH), turned = up(t, LANES) * deep(width / 2), half = (q + 1) / 2;
        auto take = [&](int64_t count) { return from + (size += up(count, LANES)) - up(count, LANES); };
        turned_keys = take(turned), turned_values = take(turned);
        coupled_keys = take(width * deep((t + 1) / 2));
        coupled_queries = take(width * deep(half)), coupled_changes = take(width * deep(half));
        weights = take(half * whole), slopes = take(half * whole);
        logits = (float *)take(QUERIES * whole), towards = (float *)take(QUERIES * whole);
        rows = (bf16 *)take(QUERIES * whole / 2);
    }
};

int64_t attention_scratch(int64_t q, int64_t t, int64_t width, int threads) {
    return threads * Scratch(0, q, t, width).size;
}

void attention(const bf16 *query, int64_t query_stride, const bf16 *key, const bf16 *value, int64_t stride, bf16 *out,
               float *norms, int64_t images, int64_t heads, int64_t q, int64_t t, int64_t width, pair *scratch,
               int threads) {
    int64_t whole = up(t, WIDTH), pairs = deep((t + 1) / 2), each = attention_scratch(q, t, width, 1);
    float factor = scale(width) * LOG2_E;
#pragma omp parallel num_threads(threads)
    {
        Tiles tiles;
        Scratch own(scratch + omp_get_thread_num() * each, q, t, width);
        pair *coupled = own.coupled_keys;
#pragma omp for collapse(2)
        for (int64_t image = 0; image < images; image++)
            for (int64_t head = 0; head < heads; head++) {
                const bf16 *asking = query + image * q * query_stride + head * width;
                const bf16 *keys = key + image * t * stride + head * width,
                           *values = value + image * t * stride + head * width;
                int64_t further = next(head, heads, width, t, stride);
                int64_t asked = next(head, heads, width, q, query_stride);
                bf16 *to = out + (image * q * heads + head) * width;
                float *kept = norms + (image * heads + head) * q * 2;
                turn(keys, stride, t, width / 2, own.turned_keys);
                couple(values, stride, t, width, coupled);
                for (int64_t i = 0; i < q; i += QUERIES) {
                    int64_t n = least(QUERIES, q - i);
                    multiply(rows_of(asking + i * query_stride, query_stride), n, own.turned_keys, width / 2,
                             up(t, LANES) / LANES, 0, Stored{own.logits, whole});
                    float *norm = kept + 2 * i;
                    for (int64_t r = 0; r < n; r++) norm[2 * r] = largest(own.logits + r * whole, t, factor);
                    for (int64_t r = 0; r < n; r++)
                        norm[2 * r + 1] =
                            soften(own.logits + r * whole, t, whole, factor, norm[2 * r], own.rows + r * whole);
                    fetch(asking + asked, query_stride, i, i + n, width);
                    fetch(keys + further, stride, i * t / q, (i + n) * t / q, width);
                    fetch(values + further, stride, i * t / q, (i + n) * t / q, width);
                    multiply(rows_of(own.rows, whole), n, coupled, pairs, width / LANES, 0,
                             [&](int64_t row, int64_t column, __m512 sums) {
                                 store(to + (i + row) * heads * width + column,
                                       _mm512_mul_ps(sums, _mm512_set1_ps(norm[2 * row + 1])));
                             });
                }
            }
    }
}

void attention_backward(const bf16 *query, int64_t query_stride, const bf16 *key, const bf16 *value, int64_t stride,
                        const bf16 *gradient, const float *norms, bf16 *to_query, bf16 *to_key, bf16 *to_value,
                        int64_t images, int64_t heads, int64_t q, int64_t t, int64_t width, pair *scratch,
                        int threads) {
    int64_t whole = up(t, WIDTH), pairs = deep((t + 1) / 2), half = (q + 1) / 2, back = heads * width;
    int64_t each = attention_scratch(q, t, width, 1), vectors = width / LANES, columns = up(t, LANES) / LANES;
#pragma omp parallel num_threads(threads)
    {
        Tiles tiles;
        Scratch own(scratch + omp_get_thread_num() * each, q, t, width);
#pragma omp for collapse(2)
        for (int64_t image = 0; image < images; image++)
            for (int64_t head = 0; head < heads; head++) {
                int64_t at = image * t * stride + head * width, at_query = image * q * query_stride + head * width;
                const bf16 *asking = query + at_query, *keys = key + at, *values = value + at;
                const bf16 *changes = gradient + (image * q * heads + head) * width;
                int64_t further = next(head, heads, width, t, stride);
                const float *kept = norms + (image * heads + head) * q * 2;
                turn(keys, stride, t, width / 2, own.turned_keys);
                turn(values, stride, t, width / 2, own.turned_values);
                couple(keys, stride, t, width, own.coupled_keys);
                couple(asking, query_stride, q, width, own.coupled_queries);
                couple(changes, back, q, width, own.coupled_changes);
                for (int64_t i = 0; i < q; i += QUERIES) {
                    int64_t n = least(QUERIES, q - i);
                    Left queries = rows_of(asking + i * query_stride, query_stride);
                    multiply(queries, n, own.turned_keys, width / 2, columns, 0, Stored{own.logits, whole});
                    multiply(rows_of(changes + i * back, back), n, own.turned_values, width / 2, columns, 0,
                             Stored{own.towards, whole});
                    /* An odd last row is paired with zeros. */
                    if (n % 2) {
                        memset(own.logits + n * whole, 0, whole * sizeof *own.logits);
                        memset(own.towards + n * whole, 0, whole * sizeof *own.towards);
                    }
                    for (int64_t r = 0; r < n; r += 2) {
                        const float none[2] = {0, 0}, *norm = kept + 2 * (i + r), *other = r + 1 < n ? norm + 2 : none;
                        int64_t place = (i + r) / 2 * whole, row = r * whole;
                        slopes_of(own.logits + row, own.towards + row, norm, other, t, whole, scale(width),
                                  own.weights + place, own.slopes + place, own.rows + row);
                    }
                    fetch(asking + next(head, heads, width, q, query_stride), query_stride, i, i + n, width);
                    fetch(changes + next(head, heads, width, q, back), back, i, i + n, width);
                    fetch(keys + further, stride, i * t / q, (i + n) * t / q, width);
                    fetch(values + further, stride, i * t / q, (i + n) * t / q, width);
                    multiply_rounded(to_query + at_query + i * query_stride, query_stride, rows_of(own.rows, whole), n,
                                own.coupled_keys, pairs, vectors);
                }
                multiply_rounded(to_key + at, stride, {own.slopes, 1, whole}, t, own.coupled_queries, half, vectors);
                multiply_rounded(to_value + at, stride, {own.weights, 1, whole}, t, own.coupled_changes, half, vectors);
            }
    }
}
