// Branches, barriers, and what lanes of a warp tell each other.
//
// Lanes that part at a branch wait in groups. The group with the lowest pc runs, and groups that meet become one: in
// code that compilers lay out that is where paths join again.
#pragma once
#include "machine.h"

inline void park(Warp& w, i32 pc, Mask m) {
  for (int k = 0; k < w.group_count; k++)
    if (w.groups[k].pc == pc) {
      w.groups[k].mask |= m;
      return;
    }
  w.groups[w.group_count++] = {pc, m};
}
inline bool resume(Warp& w) {
  w.meeting = std::numeric_limits<i32>::max();
  if (!w.group_count) return false;
  Group* lowest = std::min_element(w.groups, w.groups + w.group_count, [](auto& a, auto& b) { return a.pc < b.pc; });
  w.pc = lowest->pc, w.mask = lowest->mask;
  *lowest = w.groups[--w.group_count];
  for (int k = 0; k < w.group_count; k++) w.meeting = std::min(w.meeting, w.groups[k].pc);
  return true;
}

inline void branch(Warp& w, const Ins& i, Mask m) {
  Mask other = w.mask & ~m;
  if (!m) return;
  if (!other) {
    w.pc = i.target;
    return;
  }
  park(w, i.target, m);
  park(w, w.pc, other);
  resume(w);
}
inline void leave(Warp& w, const Ins&, Mask m) {
  w.live &= ~m, w.mask &= ~m;
  if (!w.mask && !resume(w)) w.done = true;
}
inline void barrier(Warp& w, const Ins& i, Mask m) {
  if (w.mask != w.live || m != w.live) report(w, i, MISSING_LANES, 0, m, 0);
  w.at_barrier = true;
}

// The lanes that a member mask names must be here.
inline Mask members_of(Warp& w, const Ins& i, i32 row, Mask m) {
  if (!m) return 0;
  Mask members = w.row<u32>(row)[__builtin_ctz(m)];
  if (members & w.live & ~m) report(w, i, MISSING_LANES, 0, m, 0);
  return members;
}
inline void warp_barrier(Warp& w, const Ins& i, Mask m) { members_of(w, i, i.a, m); }

enum Direction : u8 { UP, BUTTERFLY, INDEX };
inline void shuffle(Warp& w, const Ins& i, Mask m) {  // d, and the predicate at `target`; e: members
  Mask members = members_of(w, i, i.e, m), in_range = 0;
  const u32 *a = w.row<u32>(i.a), *b = w.row<u32>(i.b), *c = w.row<u32>(i.c);
  u32 out[LANES];
  for (int lane = 0; lane < LANES; lane++) {
    int segment = c[lane] >> 8 & 31, clamp = c[lane] & 31, by = b[lane] & 31;
    int bottom = lane & segment, limit = bottom | (clamp & ~segment), from = lane;
    bool inside = false;
    switch (i.mode) {
      case UP: from = lane - by, inside = from >= limit; break;
      case BUTTERFLY: from = lane ^ by, inside = from <= limit; break;
      default: from = bottom | (by & ~segment), inside = from <= limit;
    }
    if (!inside) from = lane;
    // What a lane reads that is not there is undefined.
    out[lane] = m & members & 1u << from ? a[from] : 0xcdcdcdcd;
    in_range |= u32(inside) << lane;
  }
  put(w, i.d, out, m);
  put_predicate(w, i.target, in_range, m);
}

enum Reduction : u8 { SUM, MAX_SIGNED, MIN_SIGNED, MAX_UNSIGNED };
inline void reduce(Warp& w, const Ins& i, Mask m) {  // b: members
  Mask members = members_of(w, i, i.b, m) & m;
  if (!members) return;
  const u32* a = w.row<u32>(i.a);
  u32 result = a[__builtin_ctz(members)];
  EACH_LANE(lane, members & (members - 1)) {
    u32 x = a[lane];
    switch (i.mode) {
      case SUM: result += x; break;
      case MAX_SIGNED: result = u32(std::max(i32(result), i32(x))); break;
      case MIN_SIGNED: result = u32(std::min(i32(result), i32(x))); break;
      default: result = std::max(result, x);
    }
  }
  put_all<u32>(w, i.d, result, m);
}

// One lane of the members: the lowest, as hardware does.
inline void elect(Warp& w, const Ins& i, Mask m) {  // d, and the predicate at `target`; a: members
  Mask members = members_of(w, i, i.a, m) & m;
  if (!members) return;
  u32 leader = u32(__builtin_ctz(members));
  put_all<u32>(w, i.d, leader, m);
  put_predicate(w, i.target, 1u << leader, m);
}

static const Entry CONTROL[] = {
    {"bra", branch}, {"ret", leave}, {"bar.sync", barrier}, {"bar.warp.sync", warp_barrier},
    {"shfl", shuffle}, {"redux", reduce}, {"elect", elect},
};
