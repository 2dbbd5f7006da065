// Instructions that work lane by lane: each a function of scalars, applied to rows.
#pragma once
#include "numbers.h"

template <auto F, class D, class A>
void unary(Warp& w, const Ins& i, Mask m) {
  const A* a = w.row<A>(i.a);
  D out[LANES];
  for (int lane = 0; lane < LANES; lane++) out[lane] = D(F(a[lane]));
  put(w, i.d, out, m);
}
template <auto F, class D, class A, class B = A>
void binary(Warp& w, const Ins& i, Mask m) {
  const A* a = w.row<A>(i.a);
  const B* b = w.row<B>(i.b);
  D out[LANES];
  for (int lane = 0; lane < LANES; lane++) out[lane] = D(F(a[lane], b[lane]));
  put(w, i.d, out, m);
}
template <auto F, class D, class A, class B = A, class C = D>
void ternary(Warp& w, const Ins& i, Mask m) {
  const A* a = w.row<A>(i.a);
  const B* b = w.row<B>(i.b);
  const C* c = w.row<C>(i.c);
  D out[LANES];
  for (int lane = 0; lane < LANES; lane++) out[lane] = D(F(a[lane], b[lane], c[lane]));
  put(w, i.d, out, m);
}
template <auto F, class A>
void compare(Warp& w, const Ins& i, Mask m) {
  const A *a = w.row<A>(i.a), *b = w.row<A>(i.b);
  u32 out = 0;
  for (int lane = 0; lane < LANES; lane++) out |= u32(F(a[lane], b[lane])) << lane;
  put_predicate(w, i.d, out, m);
}
template <auto F>
void logical(Warp& w, const Ins& i, Mask m) {
  put_predicate(w, i.d, F(w.predicate(i.a), i.b < 0 ? 0 : w.predicate(i.b)), m);
}
template <class T>
void select(Warp& w, const Ins& i, Mask m) {
  const T *a = w.row<T>(i.a), *b = w.row<T>(i.b);
  u32 choice = w.predicate(i.c);
  T out[LANES];
  for (int lane = 0; lane < LANES; lane++) out[lane] = choice >> lane & 1 ? a[lane] : b[lane];
  put(w, i.d, out, m);
}
template <class Whole, class Half>
void pack(Warp& w, const Ins& i, Mask m) {
  binary<[](Half low, Half high) { return Whole(low) | Whole(high) << 8 * sizeof(Half); }, Whole, Half>(w, i, m);
}
template <class Whole, class Half>
void unpack(Warp& w, const Ins& i, Mask m) {
  const Whole* a = w.row<Whole>(i.a);
  Half low[LANES], high[LANES];
  for (int lane = 0; lane < LANES; lane++) low[lane] = Half(a[lane]), high[lane] = Half(a[lane] >> 8 * sizeof(Half));
  put(w, i.d, low, m);
  put(w, i.b, high, m);
}

// a * b + c, with the carry out of the low word, and into the high word.
inline void multiply_add_carry_out(Warp& w, const Ins& i, Mask m) {
  const u32 *a = w.row<u32>(i.a), *b = w.row<u32>(i.b), *c = w.row<u32>(i.c);
  u32 out[LANES], carry = 0;
  for (int lane = 0; lane < LANES; lane++) {
    u64 sum = u64(a[lane] * b[lane]) + c[lane];
    out[lane] = u32(sum), carry |= u32(sum >> 32) << lane;
  }
  put(w, i.d, out, m);
  w.carry = (w.carry & ~m) | (carry & m);
}
inline void multiply_high_add_carry_in(Warp& w, const Ins& i, Mask m) {
  const u32 *a = w.row<u32>(i.a), *b = w.row<u32>(i.b), *c = w.row<u32>(i.c);
  u32 out[LANES];
  for (int lane = 0; lane < LANES; lane++)
    out[lane] = u32(u64(a[lane]) * b[lane] >> 32) + c[lane] + (w.carry >> lane & 1);
  put(w, i.d, out, m);
}

// f of the lower halves and of the upper ones, which are floats.
template <class F, class... T>
inline u64 halves(F f, T... x) {
  return u64(to_bits(f(to_float(u32(x >> 32))...))) << 32 | to_bits(f(to_float(u32(x))...));
}

// Division by zero gives all ones, as the machine does; PTX leaves it open.
template <class T>
inline T quotient(T a, T b) {
  if (b == 0) return T(-1);
  if constexpr (std::is_signed_v<T>)
    if (b == -1) return T(0 - std::make_unsigned_t<T>(a));
  return T(a / b);
}

// Shifts by the width or more leave nothing but copies of the sign.
template <class T>
inline T shifted_left(T a, u32 b) {
  return b >= 8 * sizeof(T) ? T(0) : T(a << b);
}
template <class T>
inline T shifted_right(T a, u32 b) {
  constexpr u32 LAST = 8 * sizeof(T) - 1;
  if constexpr (std::is_signed_v<T>) return T(a >> (b > LAST ? LAST : b));
  return b > LAST ? T(0) : T(a >> b);
}

template <class T>
inline T field(T a, u32 at, u32 bits) {  // bfe
  constexpr u32 WIDTH = 8 * sizeof(T);
  at &= 255, bits &= 255;
  if (!bits) return 0;
  T fill = 0;
  if constexpr (std::is_signed_v<T>) fill = T(a >> std::min(at + bits - 1, WIDTH - 1)) & 1 ? T(-1) : T(0);
  using U = std::make_unsigned_t<T>;
  U value = at >= WIDTH ? U(fill) : U(shifted_right(a, at));
  if (bits >= WIDTH) return T(value);
  U low = (U(1) << bits) - 1;
  return T((value & low) | (U(fill) & ~low));
}
inline u32 permuted(u32 a, u32 b, u32 selectors) {
  u64 bytes = u64(b) << 32 | a;
  u32 out = 0;
  for (int k = 0; k < 4; k++) {
    u32 selector = selectors >> 4 * k & 15, byte = u32(bytes >> 8 * (selector & 7)) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << 8 * k;
  }
  return out;
}
// A NaN loses against a number, and -0 lies below 0.
inline float lesser(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
// Integers to integers of other widths. width, sign: of the source's type; count: bytes of a lane of its register;
// mode: bytes of the target's type, imm: whether it is signed.
inline void convert_integer(Warp& w, const Ins& i, Mask m) {
  auto cut = [](u64 x, int bytes, bool sign) {
    int spare = 64 - 8 * bytes;
    return sign ? u64(i64(x << spare) >> spare) : x << spare >> spare;
  };
  EACH_LANE(lane, m) {
    u64 x = cut(lane_of(w, i.a, i.count, lane), i.width, i.sign);
    set_lane(w, i.d, i.row, lane, cut(x, i.mode, i.imm));
  }
}

template <auto F, class D>
void pack_narrowed(Warp& w, const Ins& i, Mask m) {  // the first operand goes to the upper half
  constexpr int BITS = 4 * sizeof(D);
  binary<[](float a, float b) { return D(F(a)) << BITS | D(F(b)); }, D, float>(w, i, m);
}

#define WIDTHS(name, op) {name ".b16", op(u16)}, {name ".b32", op(u32)}, {name ".b64", op(u64)}
#define ADD(T) binary<[](T a, T b) { return a + b; }, T, T>
#define SUB(T) binary<[](T a, T b) { return a - b; }, T, T>
#define MUL(T) binary<[](T a, T b) { return T(u64(a) * u64(b)); }, T, T>
#define MAD(T) ternary<[](T a, T b, T c) { return T(u64(a) * u64(b) + u64(c)); }, T, T>
#define AND(T) binary<[](T a, T b) { return a & b; }, T, T>
#define OR(T) binary<[](T a, T b) { return a | b; }, T, T>
#define XOR(T) binary<[](T a, T b) { return a ^ b; }, T, T>
#define NOT(T) unary<[](T a) { return ~a; }, T, T>
#define NEG(T) unary<[](T a) { return T(0) - a; }, T, T>
#define MOV(T) unary<[](T a) { return a; }, T, T>
#define SELECT(T) select<T>
#define SHL(T) binary<shifted_left<T>, T, T, u32>
#define SHR(T) binary<shifted_right<T>, T, T, u32>
#define DIV(T) binary<quotient<T>, T, T>
#define MIN(T) binary<[](T a, T b) { return (a < b) ? a : b; }, T, T>
#define MAX(T) binary<[](T a, T b) { return (a > b) ? a : b; }, T, T>
#define COMPARE(name, T, op) {"setp." name, compare<[](T a, T b) { return (a op b); }, T>}
#define COMPARE_INTEGERS(suffix, T) \
  COMPARE("eq." suffix, T, ==), COMPARE("ne." suffix, T, !=), COMPARE("lt." suffix, T, <), \
  COMPARE("le." suffix, T, <=), COMPARE("gt." suffix, T, >), COMPARE("ge." suffix, T, >=)
// Ordered comparisons of a NaN are false; those that end in u are true.
#define COMPARE_FLOATS(suffix, T) \
  COMPARE("eq." suffix, T, ==), COMPARE("lt." suffix, T, <), COMPARE("gt." suffix, T, >), \
  COMPARE("ge." suffix, T, >=), COMPARE("neu." suffix, T, !=), \
  {"setp.ne." suffix, compare<[](T a, T b) { return (a < b || a > b); }, T>}, \
  {"setp.equ." suffix, compare<[](T a, T b) { return !(a < b || a > b); }, T>}, \
  {"setp.ltu." suffix, compare<[](T a, T b) { return !(a >= b); }, T>}, \
  {"setp.geu." suffix, compare<[](T a, T b) { return !(a < b); }, T>}, \
  {"setp.num." suffix, compare<[](T a, T b) { return a == a && b == b; }, T>}
#define FLOAT(expression) [](float a, float b) { return canonical(expression); }
// Two floats in 64 bits, each as if alone.
#define FLOATS_OF_TWO(expression) \
  binary<[](u64 a, u64 b) { return halves([](float a, float b) { return canonical(expression); }, a, b); }, u64, u64>
#define FLOATS_OF_THREE(expression) \
  ternary<[](u64 a, u64 b, u64 c) { \
    return halves([](float a, float b, float c) { return canonical(expression); }, a, b, c); }, u64, u64>

static const Entry LANEWISE[] = {
    // moves
    WIDTHS("mov", MOV), WIDTHS("selp", SELECT),
    {"mov.pred", logical<[](u32 a, u32) { return a; }>},
    {"pack.b32", pack<u32, u16>}, {"pack.b64", pack<u64, u32>},
    {"unpack.b32", unpack<u32, u16>}, {"unpack.b64", unpack<u64, u32>},
    // integers
    WIDTHS("add", ADD), WIDTHS("sub", SUB), WIDTHS("mul.lo", MUL), WIDTHS("mad.lo", MAD),
    {"add.u16x2", binary<[](u32 a, u32 b) { return ((a + (b & 0xffff0000)) & 0xffff0000) | u16(a + b); }, u32, u32>},
    {"mul.hi.u32", binary<[](u32 a, u32 b) { return (u64(a) * b >> 32); }, u32, u32>},
    {"mul.hi.s32", binary<[](i32 a, i32 b) { return (i64(a) * b >> 32); }, i32, i32>},
    {"mul.wide.u16", binary<[](u16 a, u16 b) { return u32(a) * b; }, u32, u16>},
    {"mul.wide.s16", binary<[](i16 a, i16 b) { return i32(a) * b; }, i32, i16>},
    {"mul.wide.u32", binary<[](u32 a, u32 b) { return u64(a) * b; }, u64, u32>},
    {"mul.wide.s32", binary<[](i32 a, i32 b) { return i64(a) * b; }, i64, i32>},
    {"mad.wide.u32", ternary<[](u32 a, u32 b, u64 c) { return u64(a) * b + c; }, u64, u32>},
    {"mad.wide.s32", ternary<[](i32 a, i32 b, u64 c) { return u64(i64(a) * b) + c; }, u64, i32>},
    {"mad.lo.cc.b32", multiply_add_carry_out}, {"madc.hi.u32", multiply_high_add_carry_in},
    {"div.u32", DIV(u32)}, {"div.s32", DIV(i32)}, {"div.s64", DIV(i64)},
    {"rem.s32", binary<[](i32 a, i32 b) { return b ? i32(i64(a) % b) : a; }, i32, i32>},
    {"min.s32", MIN(i32)}, {"min.s64", MIN(i64)}, {"max.u32", MAX(u32)}, {"max.s32", MAX(i32)},
    WIDTHS("and", AND), WIDTHS("or", OR), WIDTHS("xor", XOR), {"not.b32", NOT(u32)}, WIDTHS("neg", NEG),
    {"and.pred", logical<[](u32 a, u32 b) { return a & b; }>}, {"or.pred", logical<[](u32 a, u32 b) { return a | b; }>},
    {"xor.pred", logical<[](u32 a, u32 b) { return a ^ b; }>}, {"not.pred", logical<[](u32 a, u32) { return ~a; }>},
    WIDTHS("shl", SHL), {"shr.u16", SHR(u16)}, {"shr.u32", SHR(u32)}, {"shr.s32", SHR(i32)}, {"shr.u64", SHR(u64)}, {"shr.s64", SHR(i64)},
    {"shf.l.wrap.b32", ternary<[](u32 low, u32 high, u32 n) { return (u32((u64(high) << 32 | low) << (n & 31) >> 32)); }, u32, u32>},
    {"popc.b32", unary<[](u32 a) { return __builtin_popcount(a); }, u32, u32>},
    {"bfe.u32", ternary<field<u32>, u32, u32>}, {"bfe.s32", ternary<field<i32>, i32, i32, u32, u32>},
    {"prmt.b32", ternary<permuted, u32, u32>},
    COMPARE_INTEGERS("u16", u16), COMPARE_INTEGERS("u32", u32), COMPARE_INTEGERS("s32", i32),
    COMPARE_INTEGERS("u64", u64), COMPARE_INTEGERS("s64", i64),
    // floats
    COMPARE_FLOATS("f32", float),
    {"add.f32", binary<FLOAT(a + b), float, float>}, {"sub.f32", binary<FLOAT(a - b), float, float>},
    {"mul.f32", binary<FLOAT(a * b), float, float>}, {"div.f32", binary<FLOAT(a / b), float, float>},
    {"mul.ftz.f32", binary<FLOAT(flushed(flushed(a) * flushed(b))), float, float>},
    {"fma.f32", ternary<[](float a, float b, float c) { return canonical(__builtin_fmaf(a, b, c)); }, float, float>},
    {"fma.ftz.f32", ternary<[](float a, float b, float c) {
       return canonical(flushed(__builtin_fmaf(flushed(a), flushed(b), flushed(c)))); }, float, float>},
    {"min.f32", binary<FLOAT(lesser(a, b)), float, float>},
    {"neg.f32", unary<[](u32 a) { return a ^ 0x80000000u; }, u32, u32>},
    {"abs.f32", unary<[](u32 a) { return a & 0x7fffffffu; }, u32, u32>},
    {"abs.ftz.f32", unary<[](u32 a) { return to_bits(flushed(to_float(a & 0x7fffffffu))); }, u32, u32>},
    {"add.f32x2", FLOATS_OF_TWO(a + b)}, {"sub.f32x2", FLOATS_OF_TWO(a - b)}, {"mul.f32x2", FLOATS_OF_TWO(a * b)},
    {"fma.f32x2", FLOATS_OF_THREE(__builtin_fmaf(a, b, c))},
    {"mul.f64", binary<[](double a, double b) { return a * b; }, double, double>},
    // conversions
    {"cvt.integer", convert_integer},
    {"cvt.b16.b32", unary<[](u32 a) { return u16(a); }, u16, u32>}, {"cvt.b32.b64", unary<[](u64 a) { return u32(a); }, u32, u64>},
    {"cvt.b32.u16", unary<[](u16 a) { return u32(a); }, u32, u16>}, {"cvt.b64.u16", unary<[](u16 a) { return u64(a); }, u64, u16>},
    {"cvt.b64.u32", unary<[](u32 a) { return u64(a); }, u64, u32>}, {"cvt.b64.s32", unary<[](i32 a) { return i64(a); }, i64, i32>},
    {"cvt.rn.f32.s32", unary<[](i32 a) { return float(a); }, float, i32>}, {"cvt.rn.f32.s64", unary<[](i64 a) { return float(a); }, float, i64>},
    {"cvt.rn.f64.s64", unary<[](i64 a) { return double(a); }, double, i64>},
    {"cvt.rzi.s32.f32", unary<[](float a) { return saturated(std::trunc(a)); }, i32, float>},
    {"cvt.rni.ftz.s32.f32", unary<[](float a) { return saturated(std::nearbyint(flushed(a))); }, i32, float>},
    {"cvt.rmi.ftz.f32.f32", unary<[](float a) { return canonical(std::floor(flushed(a))); }, float, float>},
    {"cvt.rn.f32.f64", unary<[](double a) { return canonical(float(a)); }, float, double>},
    {"cvt.f32.f16", unary<[](u16 a) { return from_f16(a); }, float, u16>}, {"cvt.rn.f16.f32", unary<[](float a) { return to_f16(a); }, u16, float>},
    {"cvt.f32.bf16", unary<[](u16 a) { return from_bf16(a); }, float, u16>}, {"cvt.rn.bf16.f32", unary<[](float a) { return to_bf16(a); }, u16, float>},
    {"cvt.rn.f16x2.f32", pack_narrowed<to_f16, u32>}, {"cvt.rn.bf16x2.f32", pack_narrowed<to_bf16, u32>},
    {"cvt.rna.tf32.f32", unary<[](float a) { return to_tf32(a); }, u32, float>},
};
