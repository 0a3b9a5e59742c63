/* The three products of a linear layer in bfloat16; float32 weights are rounded when they are packed. Results do not
 * depend on the number of threads. */

#include "layers.h"

#include <omp.h>

#include "products.h"

#ifdef __AMX_BF16__
#define DEEP 320 /* maximum number of rows whose weight gradient is summed in registers */
#define GROUP 64 /* columns that are packed together */
#else
#define DEEP 1102
#define GROUP 48 /* the smallest multiple of vectors and panels */
#endif
#define LINE 32  /* values in a cache line */

/* x * Phi(x) and its slope, Phi(x) + x * phi(x), with the normal distribution's Phi to 1e-7 (Abramowitz and
 * Stegun, 7.1.26). */
INLINE __m512 gelu(__m512 x, __m512 *slope) {
    __m512 one = _mm512_set1_ps(1),
           bell = power_of_two(_mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(-0.5f * LOG2_E)), -120);
    __m512 below = _mm512_fmadd_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.231641888f), one), t = _mm512_rcp14_ps(below);
    t = _mm512_mul_ps(t, _mm512_fnmadd_ps(below, t, _mm512_set1_ps(2))); /* Newton */
    __m512 series = _mm512_fmadd_ps(t, _mm512_set1_ps(0.530702715f), _mm512_set1_ps(-0.726576014f));
    series = _mm512_fmadd_ps(t, series, _mm512_set1_ps(0.710706871f));
    series = _mm512_fmadd_ps(t, series, _mm512_set1_ps(-0.142248368f));
    series = _mm512_fmadd_ps(t, series, _mm512_set1_ps(0.127414796f));
    __m512 tail = _mm512_mul_ps(_mm512_mul_ps(bell, t), series);
    __m512 share = _mm512_mask_sub_ps(tail, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ), one, tail);
    *slope = _mm512_fmadd_ps(_mm512_mul_ps(x, bell), _mm512_set1_ps(0.398942280f), share);
    return _mm512_mul_ps(x, share);
}

INLINE void round_row(const float *row, int64_t n, bf16 *to) {
    for (int64_t i = 0; i < n; i += LANES) store(to + i, _mm512_loadu_ps(row + i));
}

/* Multiply rows (rows, inner) by strips and call finish(place in the result, column, sums). */
template <class Finish>
INLINE void over_rows(const bf16 *x, int64_t rows, int64_t inner, const pair *strips, int64_t width, Finish finish) {
    Tiles tiles;
#pragma omp for
    for (int64_t i = 0; i < rows; i += BLOCK)
        multiply(rows_of(x + i * inner, inner), least(BLOCK, rows - i), strips, inner / 2, width / LANES, 0,
                 [&](int64_t row, int64_t column, __m512 sums) { finish((i + row) * width + column, column, sums); });
}

int64_t linear_scratch(int64_t inputs, int64_t outputs) {
    return outputs * deep(inputs / 2) + inputs * deep(outputs / 2);
}

int64_t packed_pairs(int64_t inputs) { return deep(inputs / 2); }

/* Convert a weight to strips, which are distributed over the threads of a parallel region. */
INLINE void to_strips(const float *weight, int64_t inputs, int64_t outputs, pair *strips) {
#pragma omp for
    for (int64_t o = 0; o < outputs; o += LANES) {
        bf16 rounded[LANES * inputs];
        for (int64_t r = 0; r < LANES; r++) round_row(weight + (o + r) * inputs, inputs, rounded + r * inputs);
        turn(rounded, inputs, LANES, inputs / 2, strips + o * packed_pairs(inputs));
    }
}

void pack(const float *weight, int64_t inputs, int64_t outputs, pair *packed, int threads) {
#pragma omp parallel num_threads(threads)
    to_strips(weight, inputs, outputs, packed);
}

void linear(const bf16 *x, Weight weight, const float *bias, const bf16 *added, bf16 *out, bf16 *slopes, bool with_gelu,
            int64_t rows, int64_t inputs, int64_t outputs, pair *scratch, int threads) {
    const pair *strips = weight.packed ? weight.packed : scratch;
#pragma omp parallel num_threads(threads)
    {
        if (!weight.packed) to_strips(weight.values, inputs, outputs, scratch);
        if (with_gelu)
            over_rows(x, rows, inputs, strips, outputs, [&](int64_t place, int64_t column, __m512 sums) {
                __m512 slope, value = gelu(_mm512_add_ps(sums, _mm512_loadu_ps(bias + column)), &slope);
                store(out + place, value);
                if (slopes) store(slopes + place, slope);
            });
        else
            over_rows(x, rows, inputs, strips, outputs, [&](int64_t place, int64_t column, __m512 sums) {
                sums = _mm512_add_ps(sums, _mm512_loadu_ps(bias + column));
                if (added) {
                    _mm_prefetch((const char *)(added + place + ROWS * outputs), _MM_HINT_T0);
                    sums = _mm512_add_ps(sums, load(added + place));
                }
                store(out + place, sums);
            });
    }
}

void linear_inputs(const bf16 *gradient, const float *weight, const bf16 *slopes, bf16 *out, int64_t rows,
                   int64_t inputs, int64_t outputs, pair *strips, int threads) {
    int64_t depth = deep(outputs / 2);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t o = 0; o < 2 * depth; o += 2) {
            bf16 both[2][inputs];
            for (int64_t r = 0; r < 2 && o < outputs; r++) round_row(weight + (o + r) * inputs, inputs, both[r]);
            couple_rows(o < outputs ? both[0] : 0, o < outputs ? both[1] : 0, inputs, depth, strips + o / 2 * LANES);
        }
        if (slopes)
            over_rows(gradient, rows, outputs, strips, inputs, [&](int64_t place, int64_t, __m512 sums) {
                /* Prefetch for the next panel, whose wait would cost up to an eighth of the time. */
                _mm_prefetch((const char *)(slopes + place + ROWS * inputs), _MM_HINT_T0);
                store(out + place, _mm512_mul_ps(sums, load(slopes + place)));
            });
        else
            over_rows(gradient, rows, outputs, strips, inputs,
                      [&](int64_t place, int64_t, __m512 sums) { store(out + place, sums); });
    }
}

/* Convert gradient rows (n, outputs) to groups of GROUP columns, (pairs, GROUP) each, and add them to their sums. */
INLINE void pack_group(const bf16 *gradient, int64_t n, int64_t outputs, int64_t columns, pair *group, float *sums) {
    __m512 totals[GROUP / LANES];
    for (int64_t v = 0; v < columns / LANES; v++) totals[v] = _mm512_loadu_ps(sums + v * LANES);
    for (int64_t i = 0; i < n; i += 2) {
        fetch(gradient, outputs, i + 16, i + 18, columns);
        for (int64_t v = 0; v < columns / LANES; v++) {
            const bf16 *one = gradient + i * outputs + v * LANES, *two = i + 1 < n ? one + outputs : 0;
            couple_rows(one, two, LANES, 0, group + i / 2 * GROUP + v * LANES);
            totals[v] = _mm512_add_ps(totals[v], two ? _mm512_add_ps(load(one), load(two)) : load(one));
        }
    }
    for (int64_t v = 0; v < columns / LANES; v++) _mm512_storeu_ps(sums + v * LANES, totals[v]);
}

int64_t linear_weights_scratch(int64_t inputs, int threads) { return DEEP / 2 * (inputs + threads * GROUP); }

void linear_weights(const bf16 *gradient, const bf16 *x, float *to_weight, float *to_bias, int64_t rows, int64_t inputs,
                    int64_t outputs, pair *scratch, int threads) {
    pair *strips = scratch, *groups = scratch + DEEP / 2 * inputs;
    int64_t parts = (rows + DEEP - 1) / DEEP, most = (rows + parts - 1) / parts;
    /* Strips of, say, 512 pairs would map to the same cache sets; an odd number of pairs distributes them. */
    most = DEPTH > 1 ? up(most, 2 * DEPTH) : 4 * ((most + 1) / 4) + 2;
    memset(to_bias, 0, outputs * sizeof *to_bias);
#pragma omp parallel num_threads(threads)
    for (int64_t i = 0; i < rows; i += most) {
        Tiles tiles;
        int64_t n = least(most, rows - i), pairs = (n + 1) / 2, depth = deep(pairs);
#pragma omp for
        for (int64_t j = 0; j < 2 * depth; j += 2) {
            const bf16 *one = x + (i + j) * inputs;
            fetch(x + i * inputs, inputs, j + 8, j + 10, inputs);
            couple_rows(j < n ? one : 0, j + 1 < n ? one + inputs : 0, inputs, depth, strips + j / 2 * LANES);
        }
#pragma omp for
        for (int64_t o = 0; o < outputs; o += GROUP) {
            int64_t columns = least(GROUP, outputs - o);
            pair *group = groups + omp_get_thread_num() * (DEEP / 2 * GROUP);
            const bf16 *here = gradient + i * outputs + o, *following = x + (i + n) * inputs;
            int64_t left = least(most, rows - i - n) * inputs / LINE;
            /* Prefetch the next group, and this group's share of the next rows. */
            Ahead ahead[AHEAD] = {
                {here + GROUP, here + GROUP + (columns < outputs - o ? n * outputs : 0), outputs, GROUP},
                {following + left * o / outputs * LINE, following + left * (o + columns) / outputs * LINE, LINE, LINE},
            };
            pack_group(here, n, outputs, columns, group, to_bias + o);
            multiply({group, 1, GROUP}, columns, strips, pairs, inputs / LANES, ahead,
                     [&](int64_t row, int64_t column, __m512 sums) {
                         float *place = to_weight + (o + row) * inputs + column;
                         _mm512_storeu_ps(place, i == 0 ? sums : _mm512_add_ps(_mm512_loadu_ps(place), sums));
                     });
        }
    }
}
