// Number formats that C++ has no type for, and what PTX says of NaN.
#pragma once
#include "machine.h"

constexpr u32 NAN32 = 0x7fffffff;

// Arithmetic on float32 gives one NaN.
inline float canonical(float x) { return x == x ? x : to_float(NAN32); }
inline float flushed(float x) { return to_bits(x) & 0x7f800000 ? x : to_float(to_bits(x) & 0x80000000); }

// A float32 in fewer bits, rounded to nearest, ties to even: EXPONENT and MANTISSA bits, biased as IEEE does.
// FINITE: no infinity, and one NaN (e4m3). SATURATE: what is too large becomes the largest number.
template <int EXPONENT, int MANTISSA, bool FINITE = false, bool SATURATE = false>
inline u32 narrowed(float x) {
  constexpr int BIAS = (1 << (EXPONENT - 1)) - 1, DROPPED = 23 - MANTISSA;
  constexpr u32 TOP = ((1u << EXPONENT) - 1) << MANTISSA;                      // of infinity
  constexpr u32 LARGEST = FINITE ? (TOP | ((1u << MANTISSA) - 2)) : TOP - 1;   // finite
  constexpr u32 NOT_A_NUMBER = TOP | ((1u << MANTISSA) - 1);
  u32 bits = to_bits(x), sign = bits >> 31 << (EXPONENT + MANTISSA), size = bits & 0x7fffffff;
  if (size > 0x7f800000) return NOT_A_NUMBER;
  i32 exponent = i32(size >> 23) - 127 + BIAS;
  u32 result;
  if (exponent >= 1) {
    u32 odd = size >> DROPPED & 1;
    result = ((size + ((1u << (DROPPED - 1)) - 1) + odd) >> DROPPED) - (u32(127 - BIAS) << MANTISSA);
  } else {
    // Subnormal: the last bit is worth 2**(1 - BIAS - MANTISSA).
    u32 mantissa = (size & 0x7fffff) | (size >> 23 ? 0x800000 : 0);
    int shift = DROPPED + 1 - (size >> 23 ? exponent : 1 - 127 + BIAS);
    if (shift > 25) return sign;
    u64 half = 1ull << (shift - 1), odd = mantissa >> shift & 1;
    result = u32((mantissa + half - 1 + odd) >> shift);
  }
  if (result > LARGEST) result = SATURATE ? LARGEST : FINITE ? NOT_A_NUMBER : TOP;
  return sign | result;
}
template <int EXPONENT, int MANTISSA, bool FINITE = false>
inline float widened(u32 x) {
  constexpr int BIAS = (1 << (EXPONENT - 1)) - 1;
  constexpr u32 TOP = (1u << EXPONENT) - 1, LOW = (1u << MANTISSA) - 1;
  u32 sign = x >> (EXPONENT + MANTISSA) & 1, exponent = x >> MANTISSA & TOP, mantissa = x & LOW;
  if (exponent == TOP && (FINITE ? mantissa == LOW : true)) {
    if (FINITE || mantissa) return to_float(NAN32);
    return to_float(sign << 31 | 0x7f800000);
  }
  float size = exponent ? to_float((exponent + 127 - BIAS) << 23 | mantissa << (23 - MANTISSA))
                        : std::ldexp(float(mantissa), 1 - BIAS - MANTISSA);
  return sign ? -size : size;
}

inline u16 to_f16(float x) { return u16(narrowed<5, 10>(x)); }
inline float from_f16(u16 x) { return widened<5, 10>(x); }
inline u16 to_bf16(float x) {
  u32 bits = to_bits(x);
  return x == x ? u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fff;
}
inline float from_bf16(u16 x) { return to_float(u32(x) << 16); }
// To nearest, ties away from zero, of 10 mantissa bits; what a tensor core reads of a float32.
inline u32 to_tf32(float x) {
  u32 bits = to_bits(x);
  return x == x ? (bits + 0x1000) & 0xffffe000 : NAN32;
}
inline float from_tf32(u32 x) { return to_float(x & 0xffffe000); }

// Nearest integer in range; NaN becomes 0.
template <class To, class From>
inline To saturated(From x) {
  constexpr From END = From(std::numeric_limits<To>::max() / 2 + 1) * 2;  // the maximum plus 1, exactly
  if (!(x == x)) return 0;
  if (x >= END) return std::numeric_limits<To>::max();
  if (x <= From(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  return To(x);
}
