// 16-bit floats by their bits: no header of any compiler's, no instruction set, and no subnormal float32 on the way
// (the CPU threads of XLA flush those to zero). For host and device, without any include.

#ifndef SKIPREDUCE_ELEMENT_TYPES_H_
#define SKIPREDUCE_ELEMENT_TYPES_H_

#include "ring_schedule.h"

namespace skipreduce {

SKIPREDUCE_HOST_DEVICE inline unsigned int FloatBits(float value) {
  unsigned int bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

SKIPREDUCE_HOST_DEVICE inline float FloatFromBits(unsigned int bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// bfloat16: the upper half of a float32, rounded to nearest, ties to even. NaN stays NaN.
struct BFloat16 {
  unsigned short bits;

  SKIPREDUCE_HOST_DEVICE static BFloat16 FromFloat(float value) {
    const unsigned int wide = FloatBits(value);
    const unsigned int rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    const unsigned int nan = (wide >> 16) | 0x40u;
    return {static_cast<unsigned short>((wide & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
  }
  SKIPREDUCE_HOST_DEVICE float ToFloat() const { return FloatFromBits(static_cast<unsigned int>(bits) << 16); }
};

// float16 (IEEE 754 binary16), rounded to nearest, ties to even. NaN stays NaN, what is too large becomes infinite.
struct Float16 {
  unsigned short bits;

  SKIPREDUCE_HOST_DEVICE static Float16 FromFloat(float value) {
    const unsigned int wide = FloatBits(value);
    const unsigned int sign = (wide >> 16) & 0x8000u;
    const unsigned int magnitude = wide & 0x7fffffffu;
    // Normal numbers: the exponent's bias is 112 less, 13 bits of the mantissa are rounded away.
    const unsigned int normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal numbers: the mantissa with its leading one, in units of 2**-24.
    const unsigned int exponent = magnitude >> 23;
    const unsigned int mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const unsigned int distance = exponent >= 102u ? 126u - exponent : 24u;  // 14..24 where it is used
    const unsigned int right = distance & 31u;
    const unsigned int half = (1u << right) >> 1;
    const unsigned int subnormal = (mantissa + half - 1u + ((mantissa >> right) & 1u)) >> right;
    unsigned int result = magnitude >= 0x38800000u ? normal : exponent >= 102u ? subnormal : 0u;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : result;
    return {static_cast<unsigned short>(sign | result)};
  }

  SKIPREDUCE_HOST_DEVICE float ToFloat() const {
    const unsigned int sign = (bits & 0x8000u) << 16;
    const unsigned int magnitude = bits & 0x7fffu;
    const unsigned int shifted = magnitude << 13;
    if (magnitude >= 0x7c00u) return FloatFromBits(sign | shifted | 0x7f800000u);
    if (magnitude >= 0x0400u) return FloatFromBits(sign | (shifted + (112u << 23)));
    // Subnormal: an integer times 2**-24, exact and normal as a float32.
    return FloatFromBits(sign | FloatBits(static_cast<float>(magnitude) * 5.9604644775390625e-08f));
  }
};

}  // namespace skipreduce

#endif  // SKIPREDUCE_ELEMENT_TYPES_H_
