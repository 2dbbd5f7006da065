// What the parts of the engine share: lanes, instructions, warps, faults.
//
// A warp is 32 lanes. A register is a row of 32 values in the warp's file, a predicate one word with a bit per lane.
// An instruction names rows by their byte offset in the file; constants and special registers are rows like others.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using Mask = u32;

constexpr int LANES = 32;
constexpr Mask ALL = ~0u;
constexpr u64 SHARED_BASE = 1024;  // shared memory begins here: a null address is none, and swizzles stay aligned

// Loops over the lanes of a mask.
#define EACH_LANE(lane, mask) \
  for (Mask rest_ = (mask); rest_; rest_ &= rest_ - 1) \
    if (const int lane = __builtin_ctz(rest_); true)

// The kinds of faults; engine.py has their names in the same order.
enum Kind : i32 {
  OUT_OF_BOUNDS,
  MISALIGNED,
  SHARED_OUT_OF_BOUNDS,
  SHARED_RACE,
  SHARED_UNWRITTEN,
  SHARED_IN_FLIGHT,
  SHARED_WITHOUT_FENCE,
  LOCAL_OUT_OF_BOUNDS,
  MISSING_LANES,
  ENDLESS,
  TENSOR_OUT_OF_BOUNDS,
  TENSOR_UNWRITTEN,
  TENSOR_IN_FLIGHT,
  TENSOR_RACE,
  TENSOR_MISUSED,
  MBARRIER_MISUSED,
  KINDS
};

// As engine.py's INSTRUCTION. An offset below 0 is no operand.
struct Ins {
  u16 op;          // index of HANDLERS
  u8 negated;      // the guard is
  u8 width;        // bytes of an element in memory
  u8 count;        // elements
  u8 sign;         // elements are signed
  u8 mode;         // of the instruction's own
  u8 row;          // bytes a lane has in the registers of `list`, or in d
  i32 guard, d, a, b, c, e;
  i32 list;        // of more registers: where in Program::lists
  i32 target;      // of a branch
  i64 imm;
  u64 origin;      // bits of the parameters that an address derives from; 0: of none
};

struct FaultRecord {
  i32 kind, pc, program, warp, lane, size;
  u64 address;
};

struct Region {
  u64 low, high;
  u64 origin;  // the parameter it belongs to, as a bit; 0: pointers found in memory lead to it
};

// As engine.py's ProgramImage.
struct Program {
  const Ins* code;
  const i32* lists;
  const u8* constants;
  i32 length, file_bytes, constants_at, constants_bytes, local_bytes;
  i32 special[7];  // rows of %tid.x, %ctaid.{x,y,z}, %nctaid.{x,y,z}, or -1
};

// As engine.py's LaunchRequest.
struct Launch {
  u32 grid[3];
  u32 warps, shared_bytes, shuffled;  // shuffled: programs come in an order that is drawn
  const u64* parameters;
  const Region* regions;
  i32 region_count;
  u32 quantum;  // 0: a warp runs to its next barrier; else up to so many instructions, then another that is drawn
  u64 seed, limit;
  FaultRecord* faults;
  i32 fault_room, fault_count;
  u64 fault_totals[24];
};

struct Block;  // a program of the grid: what CUDA calls a thread block

struct Group {
  i32 pc;
  Mask mask;
};

struct Copy {  // cp.async, from its issue to the wait for it
  const Ins* ins;
  Mask mask;
  u32 to[LANES], bytes[LANES];
  u64 from[LANES];
};

struct Product {  // wgmma, likewise
  const Ins* ins;
  u64 a, b;
  bool accumulate;
  u32 rows[4][LANES];
};

struct TensorStore {  // tcgen05.st, until tcgen05.wait::st
  const Ins* ins;
  u32 address;
  std::vector<u32> values;  // of each register, of each lane
};

struct TensorProduct {  // tcgen05.mma, until an mbarrier that it was committed to is waited for
  const Ins* ins;
  u64 a, b;  // descriptors of factors in shared memory, or where in tensor memory A lies
  u32 d, shape;
  bool accumulate;
  u32 epoch;  // in which it was issued
};

struct MBarrier {
  u64 address;
  u32 expected, pending, phase;
};

// What was issued, in groups that are waited for from the oldest on.
template <class T>
struct Pending {
  std::vector<T> items;
  std::vector<size_t> groups;  // ends in `items`

  void commit() { groups.push_back(items.size()); }
  template <class F>
  void wait(size_t keep, F finish) {
    if (groups.size() <= keep) return;
    size_t end = groups[groups.size() - keep - 1];
    for (size_t k = 0; k < end; k++) finish(items[k]);
    items.erase(items.begin(), items.begin() + end);
    groups.erase(groups.begin(), groups.end() - keep);
    for (auto& group : groups) group -= end;
  }
  void clear() { items.clear(), groups.clear(); }
};

struct Warp {
  Block* block;
  u8 *file, *local;
  int id;
  i32 pc;
  Mask mask, live, carry;  // lanes that run, that have not ended; the carry flags of add.cc and its kin
  i32 meeting;             // the lowest pc at which lanes of other groups wait
  Group groups[LANES];
  int group_count;
  bool at_barrier, done;
  bool yields, tried;      // it waits for what another warp has yet to issue; it has asked an mbarrier in vain
  Pending<Copy> copies;
  Pending<Product> products;
  std::vector<TensorStore> tensor_stores;
  Pending<TensorProduct> tensor_products;
  std::vector<u64> commits;  // the mbarrier of each group of tensor_products

  template <class T>
  T* row(i32 offset) {
    return reinterpret_cast<T*>(file + offset);
  }
  u32& predicate(i32 offset) { return *row<u32>(offset); }
};

struct Shadow;
struct TensorMemory;

struct Block {
  const Program* program;
  Launch* launch;
  Shadow* shadow;
  TensorMemory* tensors;
  u8* shared;
  i64 index;
  std::vector<Warp> warps;
  std::vector<MBarrier> barriers;  // those in shared memory
};

inline void report(Warp& w, const Ins& i, Kind kind, int lane, u64 address, int size) {
  Launch& launch = *w.block->launch;
  launch.fault_totals[kind]++;
  if (launch.fault_count < launch.fault_room)
    launch.faults[launch.fault_count++] = {
        kind, i32(&i - w.block->program->code), i32(w.block->index), w.id, lane, size, address};
}

using Handler = void (*)(Warp&, const Ins&, Mask);
struct Entry {
  const char* name;
  Handler run;
};

template <class T>
inline T bits_of(const void* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}
inline u32 to_bits(float x) { return bits_of<u32>(&x); }
inline float to_float(u32 x) { return bits_of<float>(&x); }

// Write a row where the mask says.
template <class T>
inline void put(Warp& w, i32 offset, const T* values, Mask m) {
  if (offset < 0) return;
  T* to = w.row<T>(offset);
  if (m == ALL) {
    memcpy(to, values, LANES * sizeof(T));
    return;
  }
  for (int lane = 0; lane < LANES; lane++) to[lane] = m >> lane & 1 ? values[lane] : to[lane];
}
template <class T>
inline void put_all(Warp& w, i32 offset, T value, Mask m) {
  T values[LANES];
  std::fill_n(values, LANES, value);
  put(w, offset, values, m);
}
inline void put_predicate(Warp& w, i32 offset, Mask value, Mask m) {
  if (offset >= 0) w.predicate(offset) = (w.predicate(offset) & ~m) | (value & m);
}

inline u64 lane_of(Warp& w, i32 offset, int row, int lane) {
  switch (row) {
    case 2: return w.row<u16>(offset)[lane];
    case 4: return w.row<u32>(offset)[lane];
    default: return w.row<u64>(offset)[lane];
  }
}
inline void set_lane(Warp& w, i32 offset, int row, int lane, u64 value) {
  if (offset < 0) return;
  switch (row) {
    case 2: w.row<u16>(offset)[lane] = u16(value); break;
    case 4: w.row<u32>(offset)[lane] = u32(value); break;
    default: w.row<u64>(offset)[lane] = value;
  }
}
