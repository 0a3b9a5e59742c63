/* The three products of a linear layer in bfloat16; float32 weights are rounded when they are packed. Documented in
 * kernels/operators.py. Results do not depend on the number of threads.
 */

#include "products.h"

#ifdef PRODUCTS_H

#include "layers.h"

#include <omp.h>

#define BLOCK 96  /* rows per block of a thread, which stay in its cache while the weights are read */
#define DEEP 1102 /* maximum number of rows whose weight gradient is summed in registers */
#define GROUP 48  /* columns that are packed together: the smallest multiple of vectors and tiles */
#define LINE 32   /* values in a cache line */

struct target {
    bf16 *out;
    int64_t width;
    const float *bias;
    const bf16 *added;
    bf16 *slopes; /* finish_gelu writes them, finish_slope multiplies by them */
};

INLINE void finish_plain(const int vectors, __m512 sums[ROWS][PANEL], int64_t row, int64_t rows, int64_t column,
                         void *to) {
    const struct target *target = to;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors && r < rows; v++) {
            int64_t at = column + v * LANES, place = (row + r) * target->width + at;
            __m512 sum = target->bias ? _mm512_add_ps(sums[r][v], _mm512_loadu_ps(target->bias + at)) : sums[r][v];
            if (target->added) {
                _mm_prefetch((const char *)(target->added + place + ROWS * target->width), _MM_HINT_T0);
                sum = _mm512_add_ps(sum, load(target->added + place));
            }
            store(target->out + place, sum);
        }
}

/* x * Phi(x) and its slope, Phi(x) + x * phi(x), with the normal distribution's Phi to 1e-7 (Abramowitz and
 * Stegun, 7.1.26). */
INLINE __m512 gelu(__m512 x, __m512 *slope) {
    __m512 one = _mm512_set1_ps(1),
           bell = power_of_two(_mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(-0.5f * LOG2_E)));
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

INLINE void finish_gelu(const int vectors, __m512 sums[ROWS][PANEL], int64_t row, int64_t rows, int64_t column,
                        void *to) {
    const struct target *target = to;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors && r < rows; v++) {
            int64_t at = column + v * LANES, place = (row + r) * target->width + at;
            __m512 slope, value = gelu(_mm512_add_ps(sums[r][v], _mm512_loadu_ps(target->bias + at)), &slope);
            store(target->out + place, value);
            if (target->slopes) store(target->slopes + place, slope);
        }
}

INLINE void finish_slope(const int vectors, __m512 sums[ROWS][PANEL], int64_t row, int64_t rows, int64_t column,
                         void *to) {
    const struct target *target = to;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors && r < rows; v++) {
            int64_t place = (row + r) * target->width + column + v * LANES;
            /* Prefetch for the next tile, whose wait would cost up to an eighth of the time. */
            _mm_prefetch((const char *)(target->slopes + place + ROWS * target->width), _MM_HINT_T0);
            store(target->out + place, _mm512_mul_ps(sums[r][v], load(target->slopes + place)));
        }
}

INLINE void round_row(const float *row, int64_t n, bf16 *to) {
    for (int64_t i = 0; i < n; i += LANES) store(to + i, _mm512_loadu_ps(row + i));
}

/* strips: (width / 16, inner / 2, 16) */
INLINE void over_rows(const bf16 *x, int64_t rows, int64_t inner, const pair *strips, int64_t width, finish *finish,
                      struct target target) {
#pragma omp for
    for (int64_t i = 0; i < rows; i += BLOCK) {
        struct target here = target;
        here.out += i * width;
        if (here.added) here.added += i * width;
        if (here.slopes) here.slopes += i * width;
        multiply((const pair *)(x + i * inner), inner / 2, 1, least(BLOCK, rows - i), strips, inner / 2, width / LANES,
                 0, finish, &here);
    }
}

void linear(const bf16 *x, const float *weight, const float *bias, const bf16 *added, bf16 *out, bf16 *slopes,
            int64_t with_gelu, int64_t rows, int64_t inputs, int64_t outputs, pair *strips, int threads) {
    struct target target = {out, outputs, bias, added, slopes};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t o = 0; o < outputs; o += LANES) {
            bf16 rounded[LANES * inputs];
            for (int64_t r = 0; r < LANES; r++) round_row(weight + (o + r) * inputs, inputs, rounded + r * inputs);
            turn(rounded, inputs, LANES, inputs / 2, strips + o * (inputs / 2));
        }
        if (with_gelu) over_rows(x, rows, inputs, strips, outputs, finish_gelu, target);
        else over_rows(x, rows, inputs, strips, outputs, finish_plain, target);
    }
}

void linear_inputs(const bf16 *gradient, const float *weight, const bf16 *slopes, bf16 *out, int64_t rows,
                   int64_t inputs, int64_t outputs, pair *strips, int threads) {
    struct target target = {out, inputs, 0, 0, (bf16 *)slopes};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t o = 0; o < outputs; o += 2) {
            bf16 both[2][inputs];
            for (int64_t r = 0; r < 2; r++) round_row(weight + (o + r) * inputs, inputs, both[r]);
            couple_rows(both[0], both[1], inputs, outputs / 2, strips + o / 2 * LANES);
        }
        if (slopes) over_rows(gradient, rows, outputs, strips, inputs, finish_slope, target);
        else over_rows(gradient, rows, outputs, strips, inputs, finish_plain, target);
    }
}

struct sum {
    float *out;
    int64_t width, first;
};

INLINE void finish_sum(const int vectors, __m512 sums[ROWS][PANEL], int64_t row, int64_t rows, int64_t column,
                       void *to) {
    const struct sum *sum = to;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors && r < rows; v++) {
            float *place = sum->out + (row + r) * sum->width + column + v * LANES;
            _mm512_storeu_ps(place, sum->first ? sums[r][v] : _mm512_add_ps(_mm512_loadu_ps(place), sums[r][v]));
        }
}

/* Convert gradient rows (n, outputs) to groups of GROUP columns, (pairs, GROUP) each, and their sums. */
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

/* scratch: DEEP / 2 pairs for each input, and for each thread those of a group */
void linear_weights(const bf16 *gradient, const bf16 *x, float *to_weight, float *to_bias, int64_t rows, int64_t inputs,
                    int64_t outputs, pair *scratch, int threads) {
    pair *strips = scratch, *groups = scratch + DEEP / 2 * inputs;
    int64_t parts = (rows + DEEP - 1) / DEEP, most = (rows + parts - 1) / parts;
    /* Strips of, say, 512 pairs would map to the same cache sets; an odd number of pairs distributes them. */
    most = 4 * ((most + 1) / 4) + 2;
    memset(to_bias, 0, outputs * sizeof *to_bias);
#pragma omp parallel num_threads(threads)
    for (int64_t i = 0; i < rows; i += most) {
        int64_t n = least(most, rows - i), pairs = (n + 1) / 2;
#pragma omp for
        for (int64_t j = 0; j < n; j += 2) {
            fetch(x + i * inputs, inputs, j + 8, j + 10, inputs);
            couple_rows(x + (i + j) * inputs, j + 1 < n ? x + (i + j + 1) * inputs : 0, inputs, pairs,
                        strips + j / 2 * LANES);
        }
#pragma omp for
        for (int64_t o = 0; o < outputs; o += GROUP) {
            int64_t columns = least(GROUP, outputs - o);
            pair *group = groups + omp_get_thread_num() * (DEEP / 2 * GROUP);
            struct sum sum = {to_weight + o * inputs, inputs, i == 0};
            const bf16 *here = gradient + i * outputs + o, *following = x + (i + n) * inputs;
            int64_t left = least(most, rows - i - n) * inputs / LINE;
            /* Prefetch the next group, and this group's share of the next rows. */
            struct ahead ahead[AHEAD] = {
                {here + GROUP, here + GROUP + (columns < outputs - o ? n * outputs : 0), outputs, GROUP},
                {following + left * o / outputs * LINE, following + left * (o + columns) / outputs * LINE, LINE, LINE},
            };
            pack_group(here, n, outputs, columns, group, to_bias + o);
            multiply(group, 1, GROUP, columns, strips, pairs, inputs / LANES, ahead, finish_sum, &sum);
        }
    }
}

#endif
