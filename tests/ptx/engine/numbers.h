// Number formats that C++ has no type for, and what PTX says of NaN.
#pragma once
#include "machine.h"

constexpr u32 NAN32 = 0x7fffffff;

// Arithmetic on float32 gives one NaN.
inline float canonical(float x) { return x == x ? x : to_float(NAN32); }
inline float flushed(float x) { return to_bits(x) & 0x7f800000 ? x : to_float(to_bits(x) & 0x80000000); }

// Rounded to nearest, ties to even.
inline u16 to_f16(float x) {
  u32 bits = to_bits(x), sign = bits >> 31 << 15, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return 0x7fff;
  if (size >= 113 << 23) return u16(sign | std::min(0x7c00u, ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10)));
  // Subnormal: the last bit of the sum is worth 2**-24.
  return u16(sign | (to_bits(to_float(size) + 0.5f) & 0xffff));
}
inline float from_f16(u16 x) {
  u32 sign = u32(x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 1023;
  if (exponent == 31) return to_float(mantissa ? NAN32 : sign | 0x7f800000);
  float size = exponent ? to_float((exponent + 112) << 23 | mantissa << 13) : std::ldexp(float(mantissa), -24);
  return sign ? -size : size;
}
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
inline i32 saturated(float x) {
  if (x != x) return 0;
  return x >= 0x1p31f ? std::numeric_limits<i32>::max() : x <= -0x1p31f ? std::numeric_limits<i32>::min() : i32(x);
}
