/* Representation and conversion of bfloat16. */

#ifndef NUMBERS_H
#define NUMBERS_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;
typedef uint32_t __attribute__((may_alias)) pair; /* two bfloat16 values, the first in the low half */

static inline float as_float(bf16 half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to nearest, ties to even. */
static inline bf16 as_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Round up to a multiple. */
static inline int64_t up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

#endif
