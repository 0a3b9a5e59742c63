/* Multiply bfloat16 matrices with float32 accumulation, with AMX's tiles if the compiler may use them (-mamx-bf16),
 * else with the instruction VDPBF16PS, which adds the products of two pairs of values to each of 16 sums.
 *
 * Both require the two values of a pair to be adjacent. Pairs of a left matrix (rows, 2 * pairs) are adjacent in
 * row-major order. A right matrix (2 * pairs, columns) is stored as strips (columns / 16, deep(pairs), 16) of pairs,
 * which `turn` or `couple` create: 16 pairs of a strip are a tile.
 */

#ifndef PRODUCTS_H
#define PRODUCTS_H

#include <immintrin.h>

#include <type_traits>

#include "numbers.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16 /* values in a vector */
#define BLOCK 96 /* rows of the left matrix that stay in the cache while the right matrix is read */

#ifdef __AMX_BF16__
#define DEPTH 16 /* pairs that an instruction multiplies; other numbers of pairs are padded with zeros */
#else
#define DEPTH 1
#endif

INLINE int64_t deep(int64_t pairs) { return up(pairs, DEPTH); }

/* Prefetch rows whose stride is too large for the hardware prefetcher. */
INLINE void fetch(const bf16 *rows, int64_t stride, int64_t from, int64_t to, int64_t width) {
    for (int64_t i = from; i < to; i++)
        for (int64_t c = 0; c < width; c += 32) _mm_prefetch((const char *)(rows + i * stride + c), _MM_HINT_T1);
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

/* Convert rows (n, 2 * pairs) to the strips of their transpose, padded with zeros. */
INLINE void turn(const bf16 *rows, int64_t stride, int64_t n, int64_t pairs, pair *strips) {
    for (int64_t j = 0; j < n; j += LANES)
        for (int64_t p = 0; p < pairs; p += LANES) {
            __m512i square[LANES];
            int64_t here = least(LANES, pairs - p), whole = least(LANES, deep(pairs) - p);
            for (int64_t r = 0; r < LANES; r++)
                square[r] = _mm512_maskz_loadu_epi32(j + r < n ? 0xffff >> (LANES - here) : 0,
                                                     (const pair *)(rows + (j + r) * stride) + p);
            transpose(square);
            for (int64_t r = 0; r < whole; r++)
                _mm512_storeu_si512(strips + (j * deep(pairs) + (p + r) * LANES), square[r]);
        }
}

/* Store two rows of the right matrix as one pair of every strip; 0: a row of zeros. */
INLINE void couple_rows(const bf16 *one, const bf16 *two, int64_t columns, int64_t depth, pair *strips) {
    for (int64_t c = 0; c < columns; c += LANES) {
        __m512i low = _mm512_setzero_si512(), high = low;
        if (one) low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(one + c)));
        if (two) high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(two + c))), 16);
        _mm512_storeu_si512(strips + c * depth, _mm512_or_si512(low, high));
    }
}

/* Convert rows (n, columns) to strips of (n + 1) / 2 pairs, padded with zeros. */
INLINE void couple(const bf16 *rows, int64_t stride, int64_t n, int64_t columns, pair *strips) {
    int64_t depth = deep((n + 1) / 2);
    for (int64_t i = 0; i < 2 * depth; i += 2)
        couple_rows(i < n ? rows + i * stride : 0, i + 1 < n ? rows + (i + 1) * stride : 0, columns, depth,
                    strips + i / 2 * LANES);
}

INLINE void store(bf16 *to, __m512 values) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values)); }

INLINE __m512 load(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

/* Compute 2^x with a relative error of 3e-6, for x of at least `least`, so that products of the result are no denormal
 * numbers, which are slow: 2^n times a polynomial of x - n. NaNs propagate. */
INLINE __m512 power_of_two(__m512 x, float least) {
    x = _mm512_max_ps(_mm512_set1_ps(least), x);
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), rest = _mm512_sub_ps(x, n);
    __m512 power = _mm512_fmadd_ps(rest, _mm512_set1_ps(0.0095701f), _mm512_set1_ps(0.05591786f));
    power = _mm512_fmadd_ps(rest, power, _mm512_set1_ps(0.24024745f));
    power = _mm512_fmadd_ps(rest, power, _mm512_set1_ps(0.69312181f));
    power = _mm512_fmadd_ps(rest, power, _mm512_set1_ps(0.99999926f));
    return _mm512_scalef_ps(power, n);
}

#define LOG2_E 1.44269504f

/* A left matrix, whose pair p of row r is at[r * stride + p * step]. */
struct Left {
    const pair *at;
    int64_t stride, step;
};

INLINE Left rows_of(const bf16 *rows, int64_t stride) { return {(const pair *)rows, stride / 2, 1}; }

/* Rows to prefetch: `width` values every `stride`, from `at` to `end`. Memory latency is similar to the time of the
 * products of a row: prefetching single rows at intervals hides it, prefetching many rows at once would not. */
struct Ahead {
    const bf16 *at, *end;
    int64_t stride, width;
};

#define AHEAD 2 /* matrices to prefetch, left and right */

INLINE void fetch_next(Ahead *ahead) {
    if (ahead->at >= ahead->end) return;
    fetch(ahead->at, ahead->stride, 0, 1, ahead->width);
    ahead->at += ahead->stride;
}

/* A `finish` that stores float32 sums in rows of `width` values, of which the last may be followed by 15 others. */
struct Stored {
    float *to;
    int64_t width;

    void operator()(int64_t row, int64_t column, __m512 sums) const {
        _mm512_storeu_ps(to + row * width + column, sums);
    }
};

/* Both versions of `multiply` multiply a left matrix by strips (vectors, deep(pairs), 16) and call
 * finish(row, column, sums) for each vector of the product. They prefetch rows unless `ahead` is 0. */

#ifdef __AMX_BF16__

#define ROWS 32  /* rows of two tiles */

/* Configure the tiles of this thread, all of 16 rows of 64 bytes, until the end of the block. */
struct Tiles {
    Tiles() {
        struct {
            uint8_t palette, other[15];
            uint16_t bytes[16];
            uint8_t rows[16];
        } all = {1, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
        _tile_loadconfig(&all);
    }
    ~Tiles() { _tile_release(); }
};

/* Copy `rows` rows of a left matrix from row i on, padded with zeros to `depth` pairs and to a multiple of a tile. */
INLINE void copy_left(Left left, int64_t i, int64_t rows, int64_t pairs, int64_t depth, pair *to) {
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t p = 0; p < depth; p += LANES) {
            __m512i square[LANES];
            const pair *from = left.at + (i + r) * left.stride + p * left.step;
            int64_t here = least(LANES, pairs - p), there = least(LANES, rows - r);
            if (left.step == 1) {
                for (int64_t k = 0; k < LANES; k++)
                    square[k] = _mm512_maskz_loadu_epi32(k < there ? 0xffff >> (LANES - here) : 0,
                                                         from + k * left.stride);
            } else {
                for (int64_t k = 0; k < LANES; k++)
                    square[k] = k < here ? _mm512_maskz_loadu_epi32(0xffff >> (LANES - there), from + k * left.step)
                                         : _mm512_setzero_si512();
                transpose(square);
            }
            for (int64_t k = 0; k < LANES; k++) _mm512_store_si512(to + (r + k) * depth + p, square[k]);
        }
}

template <int tall, int wide>
INLINE void tile(const pair *left, int64_t stride, const pair *right, int64_t depth, float *sums, int64_t width) {
    _tile_zero(0);
    if (wide > 1) _tile_zero(1);
    if (tall > 1) _tile_zero(2);
    if (tall > 1 && wide > 1) _tile_zero(3);
    for (int64_t p = 0; p < depth; p += DEPTH) {
        _tile_loadd(4, left + p, 4 * stride);
        _tile_loadd(6, right + p * LANES, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (wide > 1) {
            _tile_loadd(7, right + (depth + p) * LANES, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (tall > 1) {
            _tile_loadd(5, left + LANES * stride + p, 4 * stride);
            _tile_dpbf16ps(2, 5, 6);
            if (wide > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 4 * width);
    if (wide > 1) _tile_stored(1, sums + LANES, 4 * width);
    if (tall > 1) _tile_stored(2, sums + LANES * width, 4 * width);
    if (tall > 1 && wide > 1) _tile_stored(3, sums + LANES * width + LANES, 4 * width);
}

template <class Finish>
INLINE void multiply(Left left, int64_t rows, const pair *right, int64_t pairs, int64_t vectors, Ahead *ahead,
                     Finish finish) {
    int64_t depth = deep(pairs), most = least(up(rows, LANES), BLOCK);
    alignas(64) pair copied[most * depth];
    alignas(64) float sums[ROWS * 2 * LANES];
    for (int64_t from = 0; from < rows; from += BLOCK) {
        int64_t n = least(BLOCK, rows - from), direct = left.step == 1 && depth == pairs ? n / ROWS * ROWS : 0;
        copy_left(left, from + direct, n - direct, pairs, depth, copied);
        for (int64_t v = 0; v < vectors; v += 2)
            for (int64_t i = 0; i < n; i += ROWS) {
                const pair *at = left.at + (from + i) * left.stride, *strips = right + v * depth * LANES;
                int64_t stride = left.stride, here = least(ROWS, n - i);
                int wide = vectors - v > 1 ? 2 : 1;
                if (i >= direct) at = copied + (i - direct) * depth, stride = depth;
                float *to = sums;
                int64_t width = 2 * LANES;
                if constexpr (std::is_same_v<Finish, Stored>)
                    width = finish.width, to = finish.to + (from + i) * width + v * LANES;
                if (here > LANES && wide > 1) tile<2, 2>(at, stride, strips, depth, to, width);
                else if (here > LANES) tile<2, 1>(at, stride, strips, depth, to, width);
                else if (wide > 1) tile<1, 2>(at, stride, strips, depth, to, width);
                else tile<1, 1>(at, stride, strips, depth, to, width);
                for (int a = 0; ahead && a < AHEAD; a++) fetch_next(ahead + a);
                if (to != sums) continue;
                for (int64_t r = 0; r < here; r++)
                    for (int w = 0; w < wide; w++)
                        finish(from + i + r, (v + w) * LANES, _mm512_load_ps(sums + r * 2 * LANES + w * LANES));
            }
    }
}

#else

#define ROWS 6   /* rows of a panel, which has 6 by up to 4 vectors of sums: 24 of the 32 registers */
#define PANEL 4  /* vectors of a panel */
#define OFTEN 8  /* pairs between two prefetched rows */

struct Tiles {
    ~Tiles() {}
};

template <int width, class Finish>
INLINE void panel(Left left, int64_t i, int64_t rows, const pair *right, int64_t pairs, int64_t column, Ahead *ahead,
                  Finish finish) {
    const pair *from[ROWS];
    /* Rows beyond the last are computed from the last row and discarded. */
    for (int r = 0; r < ROWS; r++) from[r] = left.at + least(i + r, rows - 1) * left.stride;
    __m512 sums[ROWS][PANEL];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < width; v++) sums[r][v] = _mm512_setzero_ps();
    for (int64_t begin = 0, often = ahead ? OFTEN : pairs; begin < pairs; begin += often) {
        for (int a = 0; ahead && a < AHEAD; a++) fetch_next(ahead + a);
        for (int64_t p = begin; p < (ahead ? least(begin + often, pairs) : pairs); p++) {
            __m512i strips[PANEL];
            for (int v = 0; v < width; v++) strips[v] = _mm512_loadu_si512(right + (v * pairs + p) * LANES);
            for (int r = 0; r < ROWS; r++) {
                __m512i all = _mm512_set1_epi32(from[r][p * left.step]);
                for (int v = 0; v < width; v++)
                    sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)all, (__m512bh)strips[v]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < width && i + r < rows; v++) finish(i + r, column + v * LANES, sums[r][v]);
}

template <class Finish>
INLINE void multiply(Left left, int64_t rows, const pair *right, int64_t pairs, int64_t vectors, Ahead *ahead,
                     Finish finish) {
    for (int64_t v = 0, n; v < vectors; v += n) {
        int64_t panels = (vectors - v + PANEL - 1) / PANEL, column = v * LANES;
        const pair *strips = right + v * pairs * LANES;
        n = (vectors - v + panels - 1) / panels;
        for (int64_t i = 0; i < rows; i += ROWS)
            if (n == 4) panel<4>(left, i, rows, strips, pairs, column, ahead, finish);
            else if (n == 3) panel<3>(left, i, rows, strips, pairs, column, ahead, finish);
            else if (n == 2) panel<2>(left, i, rows, strips, pairs, column, ahead, finish);
            else panel<1>(left, i, rows, strips, pairs, column, ahead, finish);
    }
}

#endif
#endif
