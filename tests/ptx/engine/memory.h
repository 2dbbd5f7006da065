// Global, shared and local memory: who may touch what, and who must have waited for whom.
#pragma once
#include "machine.h"

// What is known of every byte of shared memory. Between two barriers of a block lies an epoch; a tag is an epoch and
// the warp, or MANY warps, that touched the byte last.
struct Shadow {
  enum State : u8 { WRITTEN = 1, IN_FLIGHT = 2, UNFENCED = 4 };
  static constexpr u32 MANY = 0x7f, ATOMIC = 0x80;
  std::vector<u32> writer, reader;
  std::vector<u8> state;
  u32 epoch = 1;

  void clear(size_t bytes) {
    writer.assign(bytes, 0), reader.assign(bytes, 0), state.assign(bytes, 0);
    epoch = 1;
  }
  u32 tag(const Warp& w) const { return epoch << 8 | u32(w.id + 1); }
  bool other(u32 tag, const Warp& w) const { return tag >> 8 == epoch && (tag & MANY) != u32(w.id + 1); }

  // What is wrong with reading these bytes, or KINDS. `mark`: whoever writes there before the next barrier races.
  Kind read(const Warp& w, u32 at, int size, bool mark = true) {
    Kind wrong = KINDS;
    for (int k = 0; k < size; k++) {
      if (state[at + k] & IN_FLIGHT) wrong = SHARED_IN_FLIGHT;
      else if (!(state[at + k] & WRITTEN)) wrong = SHARED_UNWRITTEN;
      else if (other(writer[at + k], w)) wrong = SHARED_RACE;
      if (mark) reader[at + k] = other(reader[at + k], w) ? epoch << 8 | MANY : tag(w);
    }
    return wrong;
  }
  // `now`: what is there; writing the same again is no race, as Triton lets every warp that holds a value store it.
  Kind write(const Warp& w, u32 at, int size, const u8* now, const u8* then, bool atomic = false) {
    Kind wrong = KINDS;
    for (int k = 0; k < size; k++) {
      bool both_atomic = atomic && writer[at + k] & ATOMIC;
      bool same = then && state[at + k] & WRITTEN && now[k] == then[k];
      if (!same && !both_atomic && (other(writer[at + k], w) || other(reader[at + k], w))) wrong = SHARED_RACE;
      if (state[at + k] & IN_FLIGHT) wrong = SHARED_IN_FLIGHT;
      writer[at + k] = tag(w) | (atomic ? ATOMIC : 0);
      state[at + k] = WRITTEN | UNFENCED;
    }
    return wrong;
  }
  // fence.proxy.async: what this warp wrote, or others before a barrier, tensor cores may read.
  void fence(const Warp& w) {
    for (size_t k = 0; k < state.size(); k++)
      if (!other(writer[k], w)) state[k] &= u8(~UNFENCED);
  }
};

inline void addresses(Warp& w, i32 offset, int row, i64 add, u64* out) {
  if (row == 8) {
    const u64* base = w.row<u64>(offset);
    for (int lane = 0; lane < LANES; lane++) out[lane] = base[lane] + u64(add);
  } else {
    const u32* base = w.row<u32>(offset);
    for (int lane = 0; lane < LANES; lane++) out[lane] = base[lane] + u32(add);
  }
}

// --- global memory

inline const Region* region_of(const Launch& launch, const Ins& i, u64 address, int size) {
  for (int k = 0; k < launch.region_count; k++) {
    const Region& region = launch.regions[k];
    // An address that was loaded belongs to none of the parameters.
    bool may = i.origin ? region.origin & i.origin : region.origin == 0 || region.origin == ~0ull;
    if (may && address >= region.low && address + size <= region.high && address + size > address) return &region;
  }
  return nullptr;
}

// The lanes whose access is allowed.
inline Mask global_lanes(Warp& w, const Ins& i, Mask m, const u64* at, int size) {
  Launch& launch = *w.block->launch;
  const Region* region = nullptr;
  Mask allowed = 0;
  EACH_LANE(lane, m) {
    if (!(region && at[lane] >= region->low && at[lane] + size <= region->high))
      region = region_of(launch, i, at[lane], size);
    if (!region) report(w, i, OUT_OF_BOUNDS, lane, at[lane], size);
    else if (at[lane] & (size - 1)) report(w, i, MISALIGNED, lane, at[lane], size);
    else allowed |= 1u << lane;
  }
  return allowed;
}

// --- shared memory

inline Mask shared_lanes(Warp& w, const Ins& i, Mask m, const u64* at, int size) {
  Launch& launch = *w.block->launch;
  Mask allowed = 0;
  EACH_LANE(lane, m) {
    if (at[lane] < SHARED_BASE || at[lane] + size > SHARED_BASE + launch.shared_bytes)
      report(w, i, SHARED_OUT_OF_BOUNDS, lane, at[lane] - SHARED_BASE, size);
    else if (at[lane] & (size - 1)) report(w, i, MISALIGNED, lane, at[lane], size);
    else allowed |= 1u << lane;
  }
  return allowed;
}

inline u8* shared_at(Warp& w, u64 address) { return w.block->shared + (address - SHARED_BASE); }

inline void note_read(Warp& w, const Ins& i, int lane, u64 address, int size, bool mark = true) {
  Kind wrong = w.block->shadow->read(w, u32(address - SHARED_BASE), size, mark);
  if (wrong != KINDS) report(w, i, wrong, lane, address - SHARED_BASE, size);
}
inline void note_write(Warp& w, const Ins& i, int lane, u64 address, int size, const void* then, bool atomic = false) {
  const u8* now = shared_at(w, address);
  Kind wrong = w.block->shadow->write(w, u32(address - SHARED_BASE), size, now, static_cast<const u8*>(then), atomic);
  if (wrong != KINDS) report(w, i, wrong, lane, address - SHARED_BASE, size);
}

// --- loads and stores

// Where each lane's bytes lie on this machine.
struct Places {
  u8* at[LANES];
};

template <class Element, class Row>
inline void load_rows(Warp& w, const Ins& i, Mask m, const Places& places) {
  const i32* rows = w.block->program->lists + i.list;
  for (int k = 0; k < i.count; k++) {
    if (rows[k] < 0) continue;
    Row* to = w.row<Row>(rows[k]);
    EACH_LANE(lane, m) to[lane] = Row(bits_of<Element>(places.at[lane] + k * sizeof(Element)));
  }
}
inline void load_lanes(Warp& w, const Ins& i, Mask m, const Places& places) {
  switch (i.row * 100 + i.width * 10 + i.sign) {
    case 210: return load_rows<u8, u16>(w, i, m, places);
    case 220: return load_rows<u16, u16>(w, i, m, places);
    case 410: return load_rows<u8, u32>(w, i, m, places);
    case 440: return load_rows<u32, u32>(w, i, m, places);
    case 841: return load_rows<i32, i64>(w, i, m, places);
    default: return load_rows<u64, u64>(w, i, m, places);
  }
}
// The bytes that a lane stores.
inline void gather_lane(Warp& w, const Ins& i, int lane, u8* out) {
  const i32* rows = w.block->program->lists + i.list;
  for (int k = 0; k < i.count; k++) {
    u64 value = lane_of(w, rows[k], i.row, lane);
    memcpy(out + k * i.width, &value, i.width);
  }
}

// A lane that may not read gets a value that is like no other.
inline void poison(Warp& w, const Ins& i, Mask m) {
  const i32* rows = w.block->program->lists + i.list;
  for (int k = 0; k < i.count; k++) EACH_LANE(lane, m) set_lane(w, rows[k], i.row, lane, 0xcdcdcdcdcdcdcdcdull);
}

inline void load_global(Warp& w, const Ins& i, Mask m) {
  u64 at[LANES];
  addresses(w, i.a, i.mode, i.imm, at);
  Mask allowed = global_lanes(w, i, m, at, i.width * i.count);
  Places places;
  EACH_LANE(lane, allowed) places.at[lane] = reinterpret_cast<u8*>(at[lane]);
  load_lanes(w, i, allowed, places);
  poison(w, i, m & ~allowed);
}
inline void store_global(Warp& w, const Ins& i, Mask m) {
  u64 at[LANES];
  addresses(w, i.a, i.mode, i.imm, at);
  u8 bytes[64];
  EACH_LANE(lane, global_lanes(w, i, m, at, i.width * i.count)) {
    gather_lane(w, i, lane, bytes);
    memcpy(reinterpret_cast<u8*>(at[lane]), bytes, i.width * i.count);
  }
}
inline void load_shared(Warp& w, const Ins& i, Mask m) {
  u64 at[LANES];
  addresses(w, i.a, i.mode, i.imm, at);
  Mask allowed = shared_lanes(w, i, m, at, i.width * i.count);
  Places places;
  EACH_LANE(lane, allowed) {
    note_read(w, i, lane, at[lane], i.width * i.count);
    places.at[lane] = shared_at(w, at[lane]);
  }
  load_lanes(w, i, allowed, places);
  poison(w, i, m & ~allowed);
}
inline void store_shared(Warp& w, const Ins& i, Mask m) {
  u64 at[LANES];
  addresses(w, i.a, i.mode, i.imm, at);
  u8 bytes[64];
  EACH_LANE(lane, shared_lanes(w, i, m, at, i.width * i.count)) {
    gather_lane(w, i, lane, bytes);
    note_write(w, i, lane, at[lane], i.width * i.count, bytes);
    memcpy(shared_at(w, at[lane]), bytes, i.width * i.count);
  }
}
template <bool STORE>
void local_memory(Warp& w, const Ins& i, Mask m) {
  u64 at[LANES];
  addresses(w, i.a, i.mode, i.imm, at);
  int size = i.width * i.count, bytes = w.block->program->local_bytes;
  Places places;
  Mask allowed = 0;
  EACH_LANE(lane, m) {
    if (at[lane] + size > u64(bytes)) report(w, i, LOCAL_OUT_OF_BOUNDS, lane, at[lane], size);
    else if (at[lane] & (size - 1)) report(w, i, MISALIGNED, lane, at[lane], size);
    else allowed |= 1u << lane;
    places.at[lane] = w.local + size_t(lane) * bytes + at[lane];
  }
  if constexpr (STORE) {
    EACH_LANE(lane, allowed) gather_lane(w, i, lane, places.at[lane]);
  } else {
    load_lanes(w, i, allowed, places);
    poison(w, i, m & ~allowed);
  }
}

inline void load_parameter(Warp& w, const Ins& i, Mask m) {
  u64 value = w.block->launch->parameters[i.imm];
  if (i.sign && i.width == 4) value = u64(i64(i32(value)));
  if (i.row == 8) put_all<u64>(w, i.d, value, m);
  else if (i.row == 4) put_all<u32>(w, i.d, u32(value), m);
  else put_all<u16>(w, i.d, u16(value), m);
}

// --- atomics

enum Update : u8 { ADD_TO, OR_INTO };
inline void update_lane(Warp& w, const Ins& i, int lane, u8* at) {
  u64 old = 0, value = lane_of(w, i.b, i.row, lane);
  memcpy(&old, at, i.width);
  set_lane(w, i.d, i.row, lane, old);
  u64 now = i.e == ADD_TO ? old + value : old | value;
  memcpy(at, &now, i.width);
}
inline void atomic_global(Warp& w, const Ins& i, Mask m) {
  u64 at[LANES];
  addresses(w, i.a, i.mode, i.imm, at);
  EACH_LANE(lane, global_lanes(w, i, m, at, i.width)) update_lane(w, i, lane, reinterpret_cast<u8*>(at[lane]));
}
inline void atomic_shared(Warp& w, const Ins& i, Mask m) {
  u64 at[LANES];
  addresses(w, i.a, i.mode, i.imm, at);
  EACH_LANE(lane, shared_lanes(w, i, m, at, i.width)) {
    note_write(w, i, lane, at[lane], i.width, nullptr, true);
    update_lane(w, i, lane, shared_at(w, at[lane]));
  }
}

// --- asynchronous copies: they take effect as late as they may

inline void finish_copy(Warp& w, const Copy& copy) {
  EACH_LANE(lane, copy.mask) {
    u8 bytes[16] = {};
    memcpy(bytes, reinterpret_cast<const u8*>(copy.from[lane]), copy.bytes[lane]);
    u8* to = shared_at(w, copy.to[lane]);
    for (int k = 0; k < copy.ins->width; k++)
      w.block->shadow->state[copy.to[lane] - SHARED_BASE + k] &= u8(~Shadow::IN_FLIGHT);
    note_write(w, *copy.ins, lane, copy.to[lane], copy.ins->width, bytes);
    memcpy(to, bytes, copy.ins->width);
  }
}
// d: where to, mode: bytes of a lane of it, imm: added to both, the lower half to the source; b: how many bytes are
// read, the rest are zeros.
inline void copy_async(Warp& w, const Ins& i, Mask m) {
  Copy copy;
  copy.ins = &i;
  u64 to[LANES];
  addresses(w, i.d, i.mode, i.e, to);
  addresses(w, i.a, 8, i.imm, copy.from);
  copy.mask = shared_lanes(w, i, m, to, i.width);
  Mask reads = 0;
  EACH_LANE(lane, copy.mask) {
    copy.to[lane] = u32(to[lane]);
    copy.bytes[lane] = i.b < 0 ? i.width : std::min<u32>(w.row<u32>(i.b)[lane], i.width);
    if (copy.bytes[lane]) reads |= 1u << lane;
  }
  Mask allowed = global_lanes(w, i, reads, copy.from, i.width);
  EACH_LANE(lane, reads & ~allowed) copy.bytes[lane] = 0;
  EACH_LANE(lane, copy.mask) {
    note_write(w, i, lane, copy.to[lane], i.width, nullptr);
    for (int k = 0; k < i.width; k++) w.block->shadow->state[copy.to[lane] - SHARED_BASE + k] |= Shadow::IN_FLIGHT;
  }
  w.copies.items.push_back(copy);
}
inline void commit_copies(Warp& w, const Ins&, Mask) { w.copies.commit(); }
inline void wait_for_copies(Warp& w, const Ins& i, Mask) {
  w.copies.wait(size_t(i.imm), [&](const Copy& copy) { finish_copy(w, copy); });
}
inline void fence_proxy(Warp& w, const Ins&, Mask) { w.block->shadow->fence(w); }
inline void nothing(Warp&, const Ins&, Mask) {}  // wgmma.fence: warps of a block see each other's accesses at once

static const Entry MEMORY[] = {
    {"ld.param", load_parameter},
    {"ld.global", load_global}, {"st.global", store_global},
    {"ld.shared", load_shared}, {"st.shared", store_shared},
    {"ld.local", local_memory<false>}, {"st.local", local_memory<true>},
    {"atom.global", atomic_global}, {"atom.shared", atomic_shared},
    {"cp.async", copy_async}, {"cp.async.commit_group", commit_copies}, {"cp.async.wait_group", wait_for_copies},
    {"fence.proxy", fence_proxy},
};
