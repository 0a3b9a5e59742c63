/* Multiply bfloat16 matrices with float32 accumulation by VDPBF16PS, which adds the products of two pairs of values to
 * each of 16 sums. A `finish` function uses the sums while they are in registers.
 *
 * The instruction requires the two values of a pair to be adjacent. Pairs of a left matrix (rows, 2 * pairs) are
 * adjacent in row-major order. A right matrix (2 * pairs, columns) is read 16 columns at a time, from strips
 * (columns / 16, pairs, 16) that `turn` or `couple` create.
 *
 * Compiled only for processors with this instruction and without AMX, which is much faster.
 */

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#ifndef PRODUCTS_H
#define PRODUCTS_H

#include <immintrin.h>

#include "numbers.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16 /* values in a vector */
#define ROWS 6   /* rows of a tile, which has 6 by up to 4 vectors of sums: 24 of the 32 registers */
#define PANEL 4

/* Process a tile of the product: `rows` rows and `vectors` vectors, starting at `row` and `column`. */
typedef void finish(const int vectors, __m512 sums[ROWS][PANEL], int64_t row, int64_t rows, int64_t column, void *to);

/* Prefetch rows whose stride is too large for the hardware prefetcher. */
INLINE void fetch(const bf16 *rows, int64_t stride, int64_t from, int64_t to, int64_t width) {
    for (int64_t i = from; i < to; i++)
        for (int64_t c = 0; c < width; c += 32) _mm_prefetch((const char *)(rows + i * stride + c), _MM_HINT_T1);
}

/* Rows to prefetch: `width` values every `stride`, from `at` to `end`. Memory latency is similar to the time of the
 * products of a row: prefetching single rows at intervals hides it, prefetching many rows at once would not. */
struct ahead {
    const bf16 *at, *end;
    int64_t stride, width;
};

#define AHEAD 2 /* matrices to prefetch, left and right */
#define OFTEN 8 /* pairs between two prefetched rows */

INLINE void fetch_next(struct ahead *ahead) {
    if (ahead->at >= ahead->end) return;
    fetch(ahead->at, ahead->stride, 0, 1, ahead->width);
    ahead->at += ahead->stride;
}

INLINE void tile(const int vectors, const pair *const left[ROWS], int64_t step, const pair *right, int64_t pairs,
                 struct ahead ahead[AHEAD], __m512 sums[ROWS][PANEL]) {
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_setzero_ps();
    for (int64_t from = 0, often = ahead ? OFTEN : pairs; from < pairs; from += often) {
        for (int a = 0; ahead && a < AHEAD; a++) fetch_next(ahead + a);
        for (int64_t p = from; p < (ahead ? least(from + often, pairs) : pairs); p++) {
            __m512i strips[PANEL];
            for (int v = 0; v < vectors; v++) strips[v] = _mm512_loadu_si512(right + (v * pairs + p) * LANES);
            for (int r = 0; r < ROWS; r++) {
                __m512i all = _mm512_set1_epi32(left[r][p * step]);
                for (int v = 0; v < vectors; v++)
                    sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)all, (__m512bh)strips[v]);
            }
        }
    }
}

/* Multiply a left matrix, whose pair p of row r is left[r * stride + p * step], by strips (vectors, pairs, 16), and
 * prefetch later rows unless `ahead` is 0. */
INLINE void multiply(const pair *left, int64_t stride, int64_t step, int64_t rows, const pair *right, int64_t pairs,
                     int64_t vectors, struct ahead ahead[AHEAD], finish *finish, void *to) {
    for (int64_t v = 0, n; v < vectors; v += n) {
        int64_t panels = (vectors - v + PANEL - 1) / PANEL;
        n = (vectors - v + panels - 1) / panels;
        for (int64_t i = 0; i < rows; i += ROWS) {
            const pair *from[ROWS], *strips = right + v * pairs * LANES;
            /* Rows beyond the last are computed from the last row and discarded. */
            for (int r = 0; r < ROWS; r++) from[r] = left + least(i + r, rows - 1) * stride;
            __m512 sums[ROWS][PANEL];
#define FINISHED(N) tile(N, from, step, strips, pairs, ahead, sums), finish(N, sums, i, rows - i, v * LANES, to)
            if (n == 4) FINISHED(4);
            else if (n == 3) FINISHED(3);
            else if (n == 2) FINISHED(2);
            else FINISHED(1);
#undef FINISHED
        }
    }
}

/* Transpose a square of 16 by 16 pairs. */
INLINE void transpose(__m512i square[LANES]) {
    __m512i other[LANES];
    for (int i = 0; i < LANES; i += 2) {
        other[i] = _mm512_unpacklo_epi32(square[i], square[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(square[i], square[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            square[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
            square[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
        }
    /* Now quarter q of vector 4 * g + c holds column 4 * q + c of rows 4 * g to 4 * g + 3. */
    for (int c = 0; c < 4; c++)
        for (int g = 0; g < LANES; g += 8) {
            other[g + c] = _mm512_shuffle_i32x4(square[g + c], square[g + c + 4], 0x88);
            other[g + c + 4] = _mm512_shuffle_i32x4(square[g + c], square[g + c + 4], 0xdd);
        }
    for (int c = 0; c < 8; c++) {
        square[c] = _mm512_shuffle_i32x4(other[c], other[c + 8], 0x88);
        square[c + 8] = _mm512_shuffle_i32x4(other[c], other[c + 8], 0xdd);
    }
}

/* Convert rows (n, 2 * pairs) to the strips of their transpose, (n / 16, pairs, 16), padded with zeros. */
INLINE void turn(const bf16 *rows, int64_t stride, int64_t n, int64_t pairs, pair *strips) {
    for (int64_t j = 0; j < n; j += LANES)
        for (int64_t p = 0; p < pairs; p += LANES) {
            __m512i square[LANES];
            int64_t here = least(LANES, pairs - p);
            for (int64_t r = 0; r < LANES; r++)
                square[r] = _mm512_maskz_loadu_epi32(j + r < n ? 0xffff >> (LANES - here) : 0,
                                                     (const pair *)(rows + (j + r) * stride) + p);
            transpose(square);
            for (int64_t r = 0; r < here; r++) _mm512_storeu_si512(strips + (j * pairs + (p + r) * LANES), square[r]);
        }
}

/* Store two rows of the right matrix as one pair of every strip. */
INLINE void couple_rows(const bf16 *one, const bf16 *two, int64_t columns, int64_t pairs, pair *strips) {
    for (int64_t c = 0; c < columns; c += LANES) {
        __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(one + c))),
                high = _mm512_setzero_si512();
        if (two) high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(two + c))), 16);
        _mm512_storeu_si512(strips + c * pairs, _mm512_or_si512(low, high));
    }
}

/* Convert rows (n, columns) to strips (columns / 16, pairs, 16), pairs = (n + 1) / 2; an odd last row is paired with
 * zeros. */
INLINE void couple(const bf16 *rows, int64_t stride, int64_t n, int64_t columns, pair *strips) {
    for (int64_t i = 0; i < n; i += 2)
        couple_rows(rows + i * stride, i + 1 < n ? rows + (i + 1) * stride : 0, columns, (n + 1) / 2,
                    strips + i / 2 * LANES);
}

INLINE void store(bf16 *to, __m512 values) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values)); }

INLINE __m512 load(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

/* Compute 2^x with a relative error of 3e-6, at least 2^-126: 2^n times a polynomial of x - n. NaNs propagate. */
INLINE __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126), x);
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), rest = _mm512_sub_ps(x, n);
    __m512 power = _mm512_fmadd_ps(rest, _mm512_set1_ps(0.0095701f), _mm512_set1_ps(0.05591786f));
    power = _mm512_fmadd_ps(rest, power, _mm512_set1_ps(0.24024745f));
    power = _mm512_fmadd_ps(rest, power, _mm512_set1_ps(0.69312181f));
    power = _mm512_fmadd_ps(rest, power, _mm512_set1_ps(0.99999926f));
    return _mm512_scalef_ps(power, n);
}

#define LOG2_E 1.44269504f

#endif
#endif
