// Tensor memory, the products that take place there (tcgen05), and the barriers in shared memory that say when they
// have (mbarrier).
//
// 128 rows of 512 columns of 32 bits, which a program allocates columns of. Warp w reaches rows 32 (w % 4) and the 31
// behind it. An address has the row in its upper half, the column in the lower one. Stores and products take effect as
// late as they may; products are done in order.
#pragma once
#include "tensor.h"

struct TensorMemory {
  static constexpr u32 ROWS = 128, COLUMNS = 512;
  enum State : u8 { WRITTEN = 1, STORING = 2 };
  struct Range {
    u32 first, count;
    const Ins* ins;
  };
  std::vector<u32> cells, writer;  // row by row; a writer is a tag as in Shadow, or 0: a product
  std::vector<u8> state;
  std::vector<Range> held;
  bool relinquished = false;
  u32 read_by[COLUMNS], written_by[COLUMNS];  // how many products under way

  void clear() { held.clear(), relinquished = false; }
  // The highest columns that are free, lest programs get away with taking column 0 for granted; or -1.
  i32 allocate(u32 count, const Ins* ins) {
    if (cells.empty()) cells.resize(ROWS * COLUMNS), writer.resize(ROWS * COLUMNS), state.resize(ROWS * COLUMNS);
    for (i32 first = i32(COLUMNS - count); first >= 0; first -= i32(count)) {
      auto overlaps = [&](const Range& r) { return u32(first) < r.first + r.count && r.first < u32(first) + count; };
      if (std::any_of(held.begin(), held.end(), overlaps)) continue;
      held.push_back({u32(first), count, ins});
      for (u32 row = 0; row < ROWS; row++)
        for (u32 column = u32(first); column < u32(first) + count; column++)
          cells[row * COLUMNS + column] = ~0u, state[row * COLUMNS + column] = 0;
      std::fill_n(read_by + first, count, 0), std::fill_n(written_by + first, count, 0);
      return first;
    }
    return -1;
  }
  bool holds(u32 first, u32 count) const {
    return std::any_of(held.begin(), held.end(),
                       [&](const Range& r) { return first >= r.first && first + count <= r.first + r.count; });
  }
};

inline u32 lane_row(u32 address) { return address >> 16; }
inline u32 column_of(u32 address) { return address & 0xffff; }
constexpr int CELL = 4;  // bytes of one, as faults say them

inline u32 one_address(Warp& w, i32 row, i64 add, Mask m) { return w.row<u32>(row)[__builtin_ctz(m)] + u32(add); }

inline void allocate(Warp& w, const Ins& i, Mask m) {  // a, mode, imm: where the address goes; e: columns
  if (!m || !everyone(w, i, m)) return;
  TensorMemory& tensors = *w.block->tensors;
  u64 at[LANES];
  addresses(w, i.a, i.mode, i.imm, at);
  bool power = i.e >= 32 && i.e <= i32(TensorMemory::COLUMNS) && !(i.e & (i.e - 1));
  i32 first = power && !tensors.relinquished ? tensors.allocate(u32(i.e), &i) : -1;
  if (first < 0) return report(w, i, TENSOR_MISUSED, 0, u64(i.e), 0);
  u32 address = u32(first);
  if (!shared_lanes(w, i, 1, at, 4)) return;
  note_write(w, i, 0, at[0], 4, &address);
  memcpy(shared_at(w, at[0]), &address, 4);
}
inline void give_back(Warp& w, const Ins& i, Mask m) {  // a: address, e: columns
  if (!m || !everyone(w, i, m)) return;
  TensorMemory& tensors = *w.block->tensors;
  u32 address = one_address(w, i.a, 0, m);
  auto& held = tensors.held;
  auto found = std::find_if(held.begin(), held.end(),
                            [&](const TensorMemory::Range& r) { return r.first == address && r.count == u32(i.e); });
  if (found == held.end()) return report(w, i, TENSOR_MISUSED, 0, address, CELL);
  for (u32 column = found->first; column < found->first + found->count; column++)
    if (tensors.read_by[column] || tensors.written_by[column]) {
      report(w, i, TENSOR_IN_FLIGHT, 0, column, CELL);
      break;
    }
  held.erase(found);
}
inline void relinquish(Warp& w, const Ins& i, Mask m) {
  if (m && everyone(w, i, m)) w.block->tensors->relinquished = true;
}

// --- registers to and from tensor memory
//
// mode: lanes 16 to 31 have the rows of lanes 0 to 15, `e` columns further on (16x32bx2), or rows of their own (32x32b);
// width: registers.

// Calls f(register, lane, cell) where the warp may; false if it may not.
template <class F>
bool each_cell(Warp& w, const Ins& i, u32 address, F f) {
  TensorMemory& tensors = *w.block->tensors;
  u32 row = lane_row(address), column = column_of(address), own = 32 * u32(w.id % 4);
  bool inside = i.mode ? row == own || row == own + 16 : row == own;
  for (u32 part = 0; part < (i.mode ? 2u : 1u); part++)
    inside = inside && tensors.holds(column + part * u32(i.e), i.width);
  if (!inside) {
    report(w, i, TENSOR_OUT_OF_BOUNDS, 0, address, CELL);
    return false;
  }
  for (int k = 0; k < i.width; k++)
    for (u32 lane = 0; lane < LANES; lane++) {
      u32 at_row = row + (i.mode ? lane % 16 : lane), at_column = column + k + (i.mode && lane >= 16 ? u32(i.e) : 0);
      f(k, int(lane), at_row * TensorMemory::COLUMNS + at_column);
    }
  return true;
}
inline bool same_address(Warp& w, const Ins& i) {
  const u32* at = w.row<u32>(i.a);
  if (std::all_of(at, at + LANES, [&](u32 x) { return x == at[0]; })) return true;
  report(w, i, TENSOR_MISUSED, 0, at[0], CELL);
  return false;
}
inline void load_tensors(Warp& w, const Ins& i, Mask m) {
  if (!m || !everyone(w, i, m) || !same_address(w, i)) return;
  TensorMemory& tensors = *w.block->tensors;
  const i32* rows = w.block->program->lists + i.list;
  Kind wrong = KINDS;
  u32 where = 0;
  each_cell(w, i, one_address(w, i.a, i.imm, m), [&](int k, int lane, u32 cell) {
    u32 column = cell % TensorMemory::COLUMNS;
    Kind found = tensors.state[cell] & TensorMemory::STORING || tensors.written_by[column] ? TENSOR_IN_FLIGHT
                 : !(tensors.state[cell] & TensorMemory::WRITTEN)                         ? TENSOR_UNWRITTEN
                 : w.block->shadow->other(tensors.writer[cell], w)                         ? TENSOR_RACE
                                                                                           : KINDS;
    if (found != KINDS) wrong = found, where = cell / TensorMemory::COLUMNS << 16 | column;
    if (rows[k] >= 0) w.row<u32>(rows[k])[lane] = tensors.cells[cell];
  });
  if (wrong != KINDS) report(w, i, wrong, 0, where, CELL);
}
inline void store_tensors(Warp& w, const Ins& i, Mask m) {
  if (!m || !everyone(w, i, m) || !same_address(w, i)) return;
  TensorMemory& tensors = *w.block->tensors;
  const i32* rows = w.block->program->lists + i.list;
  TensorStore store{&i, one_address(w, i.a, i.imm, m), std::vector<u32>(size_t(i.width) * LANES)};
  bool busy = false;
  bool may = each_cell(w, i, store.address, [&](int k, int lane, u32 cell) {
    u32 column = cell % TensorMemory::COLUMNS;
    busy = busy || tensors.read_by[column] || tensors.written_by[column];
    store.values[size_t(k * LANES + lane)] = w.row<u32>(rows[k])[lane];
    tensors.state[cell] |= TensorMemory::STORING, tensors.writer[cell] = w.block->shadow->tag(w);
  });
  if (busy) report(w, i, TENSOR_IN_FLIGHT, 0, store.address, CELL);
  if (may) w.tensor_stores.push_back(std::move(store));
}
inline void wait_for_tensor_stores(Warp& w, const Ins&, Mask) {
  TensorMemory& tensors = *w.block->tensors;
  for (const TensorStore& store : w.tensor_stores)
    each_cell(w, *store.ins, store.address, [&](int k, int lane, u32 cell) {
      tensors.cells[cell] = store.values[size_t(k * LANES + lane)];
      tensors.state[cell] = TensorMemory::WRITTEN;
    });
  w.tensor_stores.clear();
}
// What was loaded is in its registers at once: machines hold back whoever reads one, whatever PTX says, and Triton
// lets arithmetic begin before this wait.
inline void wait_for_tensor_loads(Warp&, const Ins&, Mask) {}

// --- products

// What tcgen05.mma's shape operand says.
struct ProductShape {
  int type, rows, columns;
  bool a_turned, b_turned, known;

  // f16: of kind::f16, else of kind::tf32.
  ProductShape(u32 bits, bool f16) {
    u32 a = bits >> 7 & 7, b = bits >> 10 & 7;
    type = f16 ? BF16 : TF32;
    rows = int(bits >> 24 & 31) * 16, columns = int(bits >> 17 & 63) * 8;
    a_turned = bits >> 15 & 1, b_turned = bits >> 16 & 1;
    // No sparse or negated factors, no saturation, sums in float32, nothing in what is reserved.
    known = (bits & 0x7f) == 0x10 && !(bits & 0xe0806000) && a == b && a == (f16 ? 1 : 2) &&
            (rows == 64 || rows == 128) && columns && columns <= 256 && columns % (rows == 64 ? 8 : 16) == 0;
  }
  int depth() const { return type == TF32 ? 8 : 16; }
  int row(int r) const { return rows == 64 ? r % 16 + 32 * (r / 16) : r; }
  int a_columns() const { return 8; }  // 32 bytes in either kind
};
inline int swizzle_of(u64 descriptor) {  // as Descriptor counts; -1: one that the engine does not know
  const int known[] = {0, -1, 1, -1, 2, -1, 3, -1};
  bool plain = (descriptor >> 46 & 7) == 1 && !(descriptor >> 49 & 0xfff);
  return plain ? known[descriptor >> 61] : -1;
}
template <class F>
void each_factor(const TensorProduct& p, const ProductShape& shape, bool a_in_tensors, float* left, float* right, F piece_at) {
  if (!a_in_tensors)
    read_factors<16>(Descriptor(p.a, swizzle_of(p.a)), shape.type, 0, shape.rows, shape.depth(), !shape.a_turned, left, piece_at);
  read_factors<16>(Descriptor(p.b, swizzle_of(p.b)), shape.type, 0, shape.columns, shape.depth(), !shape.b_turned, right, piece_at);
}

// a, imm: D; b, e: A, in tensor memory if `count`; c: B's descriptor; target: its shape; d: whether D is added to;
// mode: of kind::f16.
inline void issue_tensor_product(Warp& w, const Ins& i, Mask m) {
  TensorMemory& tensors = *w.block->tensors;
  Shadow& shadow = *w.block->shadow;
  EACH_LANE(lane, m) {
    TensorProduct p;
    p.ins = &i, p.epoch = shadow.epoch, p.d = w.row<u32>(i.a)[lane] + u32(i.imm), p.b = w.row<u64>(i.c)[lane];
    p.a = i.count ? w.row<u32>(i.b)[lane] + u32(i.e) : w.row<u64>(i.b)[lane];
    p.shape = w.row<u32>(i.target)[lane], p.accumulate = w.predicate(i.d) >> lane & 1;
    ProductShape shape(p.shape, i.mode);
    u32 d = column_of(p.d), a = column_of(u32(p.a));
    bool rows = lane_row(p.d) == 0 || (shape.rows == 64 && lane_row(p.d) == 16);
    if (!shape.known || swizzle_of(p.b) < 0 || (!i.count && swizzle_of(p.a) < 0) || (i.count && shape.a_turned) ||
        (i.count && lane_row(u32(p.a)) != lane_row(p.d))) {
      report(w, i, TENSOR_MISUSED, lane, p.d, CELL);
      continue;
    }
    if (!rows || !tensors.holds(d, u32(shape.columns)) || (i.count && !tensors.holds(a, u32(shape.a_columns())))) {
      report(w, i, TENSOR_OUT_OF_BOUNDS, lane, p.d, CELL);
      continue;
    }
    Kind wrong = KINDS;
    u64 where = 0;
    auto look = [&](u32 first, int count) {
      for (int r = 0; r < shape.rows; r++)
        for (int k = 0; k < count; k++) {
          u32 row = lane_row(p.d) + u32(shape.row(r)), cell = row * TensorMemory::COLUMNS + first + u32(k);
          u8 state = tensors.state[cell];
          Kind found = state & TensorMemory::STORING                               ? TENSOR_IN_FLIGHT
                       : tensors.written_by[first + u32(k)]                        ? KINDS  // products keep their order
                       : !(state & TensorMemory::WRITTEN)                          ? TENSOR_UNWRITTEN
                       : shadow.other(tensors.writer[cell], w)                     ? TENSOR_RACE
                                                                                   : KINDS;
          if (found != KINDS) wrong = found, where = row << 16 | (first + u32(k));
        }
    };
    if (i.count) look(a, shape.a_columns());
    if (p.accumulate) look(d, shape.columns);
    if (wrong != KINDS) report(w, i, wrong, lane, where, CELL);
    float left[128 * 16], right[256 * 16];
    each_factor(p, shape, i.count, left, right, [&](u64 at) { return product_piece(w, i, at, false); });
    for (int k = 0; k < shape.columns; k++) tensors.written_by[d + u32(k)]++;
    if (i.count) for (int k = 0; k < shape.a_columns(); k++) tensors.read_by[a + u32(k)]++;
    w.tensor_products.items.push_back(p);
  }
}
// `w` issued it, `waits` waits for it.
inline void finish_tensor_product(Warp& w, Warp& waits, const TensorProduct& p) {
  const Ins& i = *p.ins;
  TensorMemory& tensors = *w.block->tensors;
  Shadow& shadow = *w.block->shadow;
  ProductShape shape(p.shape, i.mode);
  u32 first_row = lane_row(p.d), d = column_of(p.d), a = column_of(u32(p.a));
  bool reported = false;
  // What was written to after the issue may be what the product finds.
  auto piece_at = [&](u64 at) {
    static const u8 zeros[16] = {};
    if (at < SHARED_BASE || at + 16 > SHARED_BASE + w.block->launch->shared_bytes) return zeros + 0;
    for (u64 k = at - SHARED_BASE; k < at - SHARED_BASE + 16 && !reported; k++)
      if (u32 then = shadow.writer[k] >> 8;
          then > p.epoch || (then == p.epoch && (shadow.writer[k] & Shadow::MANY) != u32(w.id + 1)) || shadow.state[k] & Shadow::IN_FLIGHT) {
        report(waits, i, shadow.state[k] & Shadow::IN_FLIGHT ? SHARED_IN_FLIGHT : SHARED_RACE, 0, k, 16);
        reported = true;
      }
    return static_cast<const u8*>(shared_at(w, at));
  };
  float left[128 * 16], right[256 * 16];
  each_factor(p, shape, i.count, left, right, piece_at);
  for (int r = 0; r < shape.rows; r++) {
    size_t row = size_t(first_row + u32(shape.row(r))) * TensorMemory::COLUMNS;
    if (i.count)
      for (int k = 0; k < shape.depth(); k++)
        left[r * 16 + k] = shape.type == TF32 ? factor(tensors.cells[row + a + u32(k)], 0, TF32)
                                              : factor(tensors.cells[row + a + u32(k / 2)], k % 2, shape.type);
    for (int column = 0; column < shape.columns; column++) {
      double sum = 0;
      for (int k = 0; k < shape.depth(); k++) sum += double(left[r * 16 + k]) * right[column * 16 + k];
      u32& cell = tensors.cells[row + d + u32(column)];
      cell = to_bits(canonical(float((p.accumulate ? double(to_float(cell)) : 0) + sum)));
      tensors.state[row + d + u32(column)] = TensorMemory::WRITTEN, tensors.writer[row + d + u32(column)] = 0;
    }
  }
  for (int k = 0; k < shape.columns; k++) tensors.written_by[d + u32(k)]--;
  if (i.count) for (int k = 0; k < shape.a_columns(); k++) tensors.read_by[a + u32(k)]--;
}

// --- barriers in shared memory

inline MBarrier* mbarrier_at(Block& block, u64 address) {
  for (MBarrier& barrier : block.barriers)
    if (barrier.address == address) return &barrier;
  return nullptr;
}
// Where the one lane of an mbarrier instruction points to, or 0 after a report.
inline u64 mbarrier_address(Warp& w, const Ins& i, int lane, bool exists) {
  u64 at[LANES];
  addresses(w, i.a, i.mode, i.imm, at);
  if (!shared_lanes(w, i, 1u << lane, at, 8)) return 0;
  if ((mbarrier_at(*w.block, at[lane]) != nullptr) == exists) return at[lane];
  report(w, i, MBARRIER_MISUSED, lane, at[lane] - SHARED_BASE, 0);
  return 0;
}
inline void open_mbarrier(Warp& w, const Ins& i, Mask m) {  // e: arrivals per phase
  EACH_LANE(lane, m) {
    u64 at = mbarrier_address(w, i, lane, false);
    if (!at) continue;
    note_write(w, i, lane, at, 8, nullptr);
    w.block->barriers.push_back({at, u32(i.e), u32(i.e), 0});
  }
}
inline void close_mbarrier(Warp& w, const Ins& i, Mask m) {
  EACH_LANE(lane, m) {
    u64 at = mbarrier_address(w, i, lane, true);
    if (!at) continue;
    note_write(w, i, lane, at, 8, nullptr);
    for (const Warp& other : w.block->warps)
      if (std::count(other.commits.begin(), other.commits.end(), at)) report(w, i, MBARRIER_MISUSED, lane, at - SHARED_BASE, 0);
    std::erase_if(w.block->barriers, [&](const MBarrier& barrier) { return barrier.address == at; });
  }
}
inline void commit_tensor_products(Warp& w, const Ins& i, Mask m) {
  EACH_LANE(lane, m) {
    u64 at = mbarrier_address(w, i, lane, true);
    if (!at) continue;
    note_read(w, i, lane, at, 8);
    w.tensor_products.commit(), w.commits.push_back(at);
  }
}
// Finish what a warp issued up to its first commit to the barrier.
inline bool finish_commit(Warp& issuer, Warp& waits, u64 at) {
  auto found = std::find(issuer.commits.begin(), issuer.commits.end(), at);
  if (found == issuer.commits.end()) return false;
  size_t done = size_t(found - issuer.commits.begin()) + 1;
  issuer.tensor_products.wait(issuer.commits.size() - done,
                              [&](const TensorProduct& p) { finish_tensor_product(issuer, waits, p); });
  for (size_t k = 0; k < done; k++) {
    MBarrier* barrier = mbarrier_at(*issuer.block, issuer.commits[k]);
    if (barrier && !--barrier->pending) barrier->pending = barrier->expected, barrier->phase++;
  }
  issuer.commits.erase(issuer.commits.begin(), issuer.commits.begin() + i64(done));
  return true;
}
// d: whether the phase of parity b is over. What is under way is not done at the first try, as it need not be.
inline void try_mbarrier(Warp& w, const Ins& i, Mask m) {
  Mask over = 0;
  EACH_LANE(lane, m) {
    u64 at = mbarrier_address(w, i, lane, true);
    if (!at) {
      over |= 1u << lane;  // reported; to wait on would hide it behind an endless loop
      continue;
    }
    note_read(w, i, lane, at, 8);
    auto passed = [&] { return (mbarrier_at(*w.block, at)->phase & 1) != (w.row<u32>(i.b)[lane] & 1); };
    bool done = passed();
    if (w.tried)
      for (Warp& issuer : w.block->warps)
        while (!done && finish_commit(issuer, w, at)) done = passed();
    over |= u32(done) << lane;
  }
  put_predicate(w, i.d, over, m);
  w.tried = w.yields = (m & ~over) != 0;
}

// Programs that end leave nothing behind.
inline void report_what_is_left(Block& block) {
  if (block.launch->fault_totals[ENDLESS]) return;
  for (Warp& w : block.warps) {
    if (!w.tensor_products.items.empty()) report(w, *w.tensor_products.items.back().ins, TENSOR_IN_FLIGHT, 0, 0, 0);
    if (!w.tensor_stores.empty()) report(w, *w.tensor_stores.back().ins, TENSOR_IN_FLIGHT, 0, 0, 0);
  }
  for (const auto& range : block.tensors->held) report(block.warps[0], *range.ins, TENSOR_MISUSED, 0, range.first, CELL);
}

static const Entry TENSOR_MEMORY[] = {
    {"tcgen05.alloc", allocate}, {"tcgen05.dealloc", give_back}, {"tcgen05.relinquish_alloc_permit", relinquish},
    {"tcgen05.ld", load_tensors}, {"tcgen05.st", store_tensors},
    {"tcgen05.wait_ld", wait_for_tensor_loads}, {"tcgen05.wait_st", wait_for_tensor_stores},
    {"tcgen05.mma", issue_tensor_product}, {"tcgen05.commit", commit_tensor_products},
    {"mbarrier.init", open_mbarrier}, {"mbarrier.inval", close_mbarrier}, {"mbarrier.try_wait", try_mbarrier},
};
