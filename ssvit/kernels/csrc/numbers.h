/* bfloat16 as C sees it. */

#ifndef NUMBERS_H
#define NUMBERS_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;
typedef uint32_t __attribute__((may_alias)) pair; /* two bfloat16 numbers, the first one low */

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

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The next multiple. */
static inline int64_t up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

#endif
