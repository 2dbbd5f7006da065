// Matrices: ldmatrix, stmatrix, mma.sync, wgmma. Products are exact and sums are rounded once; hardware orders and cuts
// them in ways of its own.
#pragma once
#include "memory.h"
#include "numbers.h"

enum Factor : u8 { BF16, TF32 };

inline bool everyone(Warp& w, const Ins& i, Mask m) {
  if (w.mask == w.live && m == w.live && m == ALL) return true;
  report(w, i, MISSING_LANES, 0, m, 0);
  return false;
}

// Two values of 16 bits, or one of 32.
inline float factor(u32 bits, int half, int type) {
  if (type == TF32) return from_tf32(bits);
  return from_bf16(half ? u16(bits >> 16) : u16(bits));
}

// 8x8 matrices of 16 bits: lane 8 k + r has the address of row r of matrix k.
struct Cell {
  int row, column;
};
inline Cell cell(int lane, int half, bool transposed) {
  int along = lane / 4, pair = lane % 4 * 2 + half;
  return transposed ? Cell{pair, along} : Cell{along, pair};
}
inline Mask matrix_rows(Warp& w, const Ins& i, u64* at) {
  addresses(w, i.a, i.mode, i.imm, at);
  return shared_lanes(w, i, i.count == 4 ? ALL : (1u << 8 * i.count) - 1, at, 16);
}
inline void load_matrices(Warp& w, const Ins& i, Mask m) {
  if (!everyone(w, i, m)) return;
  u64 at[LANES];
  Mask allowed = matrix_rows(w, i, at);
  EACH_LANE(lane, allowed) note_read(w, i, lane, at[lane], 16);
  for (int k = 0; k < i.count; k++) {
    u32* to = w.row<u32>(w.block->program->lists[i.list + k]);
    for (int lane = 0; lane < LANES; lane++) {
      u16 halves[2] = {};
      for (int half = 0; half < 2; half++) {
        Cell c = cell(lane, half, i.sign);
        if (allowed >> (8 * k + c.row) & 1) halves[half] = bits_of<u16>(shared_at(w, at[8 * k + c.row]) + 2 * c.column);
      }
      to[lane] = u32(halves[1]) << 16 | halves[0];
    }
  }
}
inline void store_matrices(Warp& w, const Ins& i, Mask m) {
  if (!everyone(w, i, m)) return;
  u64 at[LANES];
  Mask allowed = matrix_rows(w, i, at);
  u16 rows[LANES][8];
  for (int k = 0; k < i.count; k++) {
    const u32* from = w.row<u32>(w.block->program->lists[i.list + k]);
    for (int lane = 0; lane < LANES; lane++)
      for (int half = 0; half < 2; half++) {
        Cell c = cell(lane, half, i.sign);
        rows[8 * k + c.row][c.column] = u16(from[lane] >> 16 * half);
      }
  }
  EACH_LANE(lane, allowed) {
    note_write(w, i, lane, at[lane], 16, rows[lane]);
    memcpy(shared_at(w, at[lane]), rows[lane], 16);
  }
}

// mma.m16n8kK: `list` holds the registers of D, A, B and C. mode: Factor, width: K.
inline void multiply(Warp& w, const Ins& i, Mask m) {
  if (!everyone(w, i, m)) return;
  int depth = i.width, each = i.mode == TF32 ? 1 : 2, a_rows = depth / (2 * each), b_rows = a_rows / 2;
  const i32 *d = w.block->program->lists + i.list, *a = d + 4, *b = a + a_rows, *c = b + b_rows;
  double left[16][16], right[16][8];
  for (int lane = 0; lane < LANES; lane++) {
    int group = lane / 4, place = lane % 4;
    for (int half = 0; half < each; half++) {
      for (int r = 0; r < a_rows; r++)
        left[group + 8 * (r % 2)][each * place + half + 4 * each * (r / 2)] = factor(w.row<u32>(a[r])[lane], half, i.mode);
      for (int r = 0; r < b_rows; r++)
        right[each * place + half + 4 * each * r][group] = factor(w.row<u32>(b[r])[lane], half, i.mode);
    }
  }
  float out[4][LANES];
  for (int r = 0; r < 4; r++)
    for (int lane = 0; lane < LANES; lane++) {
      int row = lane / 4 + 8 * (r / 2), column = lane % 4 * 2 + r % 2;
      double sum = w.row<float>(c[r])[lane];
      for (int k = 0; k < depth; k++) sum += left[row][k] * right[k][column];
      out[r][lane] = canonical(float(sum));
    }
  for (int r = 0; r < 4; r++) put(w, d[r], out[r], m);
}

// A matrix in shared memory as a descriptor says: where 16 bytes of it lie.
struct Descriptor {
  u64 start, leading, stride;
  int swizzle;  // 0: none; 1, 2, 3: within 128, 64, 32 bytes

  Descriptor(u64 bits, int swizzle_)
      : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4),
        swizzle(swizzle_) {}
  // `line`: along the dimension whose neighbors are not contiguous; `piece`: 16 bytes along the one whose are.
  u64 piece(int line, int piece) const {
    int pieces = swizzle ? 16 >> swizzle : 1;
    u64 at = start + (line % 8) * 16 * pieces + (line / 8) * stride + (piece / pieces) * leading + piece % pieces * 16;
    return swizzle ? at ^ (at >> 3 & ((16 >> swizzle) - 1) << 4) : at;
  }
};

inline const u8* product_piece(Warp& w, const Ins& i, u64 at, bool mark = true) {
  static const u8 zeros[16] = {};
  if (at < SHARED_BASE || at + 16 > SHARED_BASE + w.block->launch->shared_bytes) {
    report(w, i, SHARED_OUT_OF_BOUNDS, 0, at - SHARED_BASE, 16);
    return zeros;
  }
  note_read(w, i, 0, at, 16, mark);
  for (int k = 0; k < 16; k++)
    if (w.block->shadow->state[at - SHARED_BASE + k] & Shadow::UNFENCED) {
      report(w, i, SHARED_WITHOUT_FENCE, 0, at - SHARED_BASE, 16);
      break;
    }
  return shared_at(w, at);
}
// `lines` x `depth` factors; `contiguous` if neighbors along the depth are. `piece_at`: address -> 16 bytes there.
template <int STRIDE, class F>
void read_factors(const Descriptor& d, int type, int first, int lines, int depth, bool contiguous, float* out, F piece_at) {
  int size = type == TF32 ? 4 : 2, per_piece = 16 / size;
  int outer = contiguous ? lines : depth, inner = contiguous ? depth : lines;
  for (int line = 0; line < outer; line++)
    for (int at = 0; at < inner; at += per_piece) {
      const u8* piece =
          piece_at(contiguous ? d.piece(first + line, at / per_piece) : d.piece(line, (first + at) / per_piece));
      for (int k = 0; k < per_piece; k++) {
        float value = size == 4 ? from_tf32(bits_of<u32>(piece + 4 * k)) : factor(bits_of<u16>(piece + 2 * k), 0, type);
        out[contiguous ? line * STRIDE + at + k : (at + k) * STRIDE + line] = value;
      }
    }
}

// wgmma.m64nNkK: `list` holds the registers of D, then those of A or its descriptor; b: B's descriptor; c: whether D is
// added to, else imm. width: N / 8, mode: Factor, count: A is in registers, sign: bits 0, 1: A, B are transposed.
inline void issue_product(Warp& w, const Ins& i, Mask m) {
  if (!everyone(w, i, m)) return;
  Product product;
  product.ins = &i;
  const i32* a = w.block->program->lists + i.list + 4 * i.width;
  product.a = 0;
  if (i.count) for (int r = 0; r < 4; r++) memcpy(product.rows[r], w.row<u32>(a[r]), sizeof product.rows[r]);
  else product.a = w.row<u64>(a[0])[0];
  product.b = w.row<u64>(i.b)[0];
  product.accumulate = i.c < 0 ? i.imm != 0 : w.predicate(i.c) & 1;
  w.products.items.push_back(product);
}
inline void finish_product(Warp& w, const Product& product) {
  const Ins& i = *product.ins;
  int columns = 8 * i.width, depth = i.mode == TF32 ? 8 : 16, each = i.mode == TF32 ? 1 : 2, first = w.id % 4 * 16;
  float left[16 * 16], right[256 * 16];
  auto piece_at = [&](u64 at) { return product_piece(w, i, at); };
  if (i.count) {
    for (int r = 0; r < 4; r++)
      for (int lane = 0; lane < LANES; lane++)
        for (int half = 0; half < each; half++)
          left[(lane / 4 + 8 * (r % 2)) * 16 + each * (lane % 4) + half + 4 * each * (r / 2)] =
              factor(product.rows[r][lane], half, i.mode);
  } else {
    read_factors<16>(Descriptor(product.a, int(product.a >> 62)), i.mode, first, 16, depth, !(i.sign & 1), left, piece_at);
  }
  read_factors<16>(Descriptor(product.b, int(product.b >> 62)), i.mode, 0, columns, depth, !(i.sign & 2), right, piece_at);
  const i32* d = w.block->program->lists + i.list;
  for (int r = 0; r < columns / 2; r++) {
    float* to = w.row<float>(d[r]);
    for (int lane = 0; lane < LANES; lane++) {
      const float* a = left + (lane / 4 + 8 * (r / 2 % 2)) * 16;
      const float* b = right + (r / 4 * 8 + lane % 4 * 2 + r % 2) * 16;
      double sum = 0;
      for (int k = 0; k < depth; k++) sum += double(a[k]) * b[k];
      to[lane] = canonical(float((product.accumulate ? double(to[lane]) : 0) + sum));
    }
  }
}
inline void commit_products(Warp& w, const Ins&, Mask) { w.products.commit(); }
inline void wait_for_products(Warp& w, const Ins& i, Mask) {
  w.products.wait(size_t(i.imm), [&](const Product& product) { finish_product(w, product); });
}

static const Entry TENSOR[] = {
    {"ldmatrix", load_matrices}, {"stmatrix", store_matrices}, {"mma", multiply},
    {"wgmma", issue_product}, {"wgmma.fence", nothing},
    {"wgmma.commit_group", commit_products}, {"wgmma.wait_group", wait_for_products},
};
