// Runs PTX that engine.py has encoded: all programs of a launch, one after the other, their warps in turns.
#include "control.h"
#include "lanewise.h"
#include "memory.h"
#include "tensor.h"
#include "tensor_memory.h"

static const std::vector<Entry>& handlers() {
  static const std::vector<Entry> all = [] {
    std::vector<Entry> table;
    table.insert(table.end(), std::begin(LANEWISE), std::end(LANEWISE));
    table.insert(table.end(), std::begin(MEMORY), std::end(MEMORY));
    table.insert(table.end(), std::begin(TENSOR), std::end(TENSOR));
    table.insert(table.end(), std::begin(TENSOR_MEMORY), std::end(TENSOR_MEMORY));
    table.insert(table.end(), std::begin(CONTROL), std::end(CONTROL));
    return table;
  }();
  return all;
}

// Up to a barrier, a wait in vain, the end, or so many instructions; `left`: what the program may still run.
static void advance(Warp& w, const Entry* table, u64 quantum, u64& left) {
  const Program& program = *w.block->program;
  w.yields = false;
  for (u64 k = 0; k < quantum && !w.done && !w.at_barrier && !w.yields; k++) {
    if (w.pc >= w.meeting) park(w, w.pc, w.mask), resume(w);
    const Ins& i = program.code[w.pc];
    if (!left--) {
      report(w, i, ENDLESS, 0, 0, 0);
      left = 0, w.done = true;
      return;
    }
    Mask m = w.mask;
    if (i.guard >= 0) m &= i.negated ? ~w.predicate(i.guard) : w.predicate(i.guard);
    w.pc++;
    table[i.op].run(w, i, m);
  }
}

struct Random {  // xorshift
  u64 state;
  u64 operator()() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
  }
};

static void fill(Warp& w, i32 offset, u32 value) {
  if (offset >= 0) std::fill_n(w.row<u32>(offset), LANES, value);
}

static void run_block(Block& block, const Entry* table, Random& random) {
  Launch& launch = *block.launch;
  u64 left = launch.limit;
  size_t n = block.warps.size();
  for (;;) {
    bool progress = false;
    size_t first = launch.quantum ? random() % n : 0;
    for (size_t k = 0; k < n; k++) {
      Warp& w = block.warps[(k + first) % n];
      if (w.done || w.at_barrier) continue;
      advance(w, table, launch.quantum ? 1 + random() % launch.quantum : ~0ull, left);
      progress = progress || !(w.done || w.at_barrier);
    }
    if (progress) continue;
    Warp *waiting = nullptr, *gone = nullptr;
    for (auto& w : block.warps) (w.at_barrier ? waiting : gone) = &w;
    if (!waiting) break;
    // Threads that have ended never come.
    if (gone) report(*waiting, block.program->code[waiting->pc - 1], MISSING_LANES, 0, 0, 0);
    for (auto& w : block.warps) w.at_barrier = false;
    block.shadow->epoch++;
  }
  report_what_is_left(block);
}

template <class T>
static T* aligned(std::vector<u8>& room, size_t bytes) {
  room.resize(bytes + 4096);
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(room.data()) + 4095) & ~uintptr_t(4095));
}

extern "C" {
int ptx_handler_count() { return int(handlers().size()); }
const char* ptx_handler_name(int k) { return handlers()[k].name; }
int ptx_size(int k) {
  const int sizes[] = {sizeof(Ins), sizeof(FaultRecord), sizeof(Region), sizeof(Program), sizeof(Launch)};
  return sizes[k];
}

void ptx_launch(const Program* program, Launch* launch) {
  static thread_local std::vector<u8> files, shared, local;
  static thread_local Shadow shadow;
  static thread_local TensorMemory tensors;
  const Entry* table = handlers().data();
  Block block;
  block.program = program, block.launch = launch, block.shadow = &shadow, block.tensors = &tensors;
  size_t file_bytes = (size_t(program->file_bytes) + 4095) & ~size_t(4095), local_bytes = size_t(program->local_bytes) * LANES;
  u8* file = aligned<u8>(files, file_bytes * launch->warps);
  u8* own = aligned<u8>(local, local_bytes * launch->warps);
  block.shared = aligned<u8>(shared, launch->shared_bytes);
  memset(file, 0xff, file_bytes * launch->warps);  // registers that nothing was written to are NaN, or -1
  block.warps.resize(launch->warps);
  for (u32 k = 0; k < launch->warps; k++) {
    Warp& w = block.warps[k];
    w.block = &block, w.id = int(k), w.file = file + file_bytes * k, w.local = own + local_bytes * k;
    memcpy(w.file + program->constants_at, program->constants, program->constants_bytes);
    if (program->special[0] >= 0) std::iota(w.row<u32>(program->special[0]), w.row<u32>(program->special[0]) + LANES, k * LANES);
    for (int axis = 0; axis < 3; axis++) fill(w, program->special[4 + axis], launch->grid[axis]);
  }
  u64 total = u64(launch->grid[0]) * launch->grid[1] * launch->grid[2];
  Random random{launch->seed * 2 + 1};
  std::vector<u64> order(total);
  for (u64 k = 0; k < total; k++) order[k] = k;
  if (launch->shuffled)
    for (u64 k = total; k > 1; k--) std::swap(order[k - 1], order[random() % k]);
  for (u64 index : order) {
    block.index = i64(index);
    u64 at[3] = {index % launch->grid[0], index / launch->grid[0] % launch->grid[1], index / launch->grid[0] / launch->grid[1]};
    memset(block.shared, 0xff, launch->shared_bytes);
    shadow.clear(launch->shared_bytes);
    tensors.clear(), block.barriers.clear();
    for (auto& w : block.warps) {
      for (int axis = 0; axis < 3; axis++) fill(w, program->special[1 + axis], u32(at[axis]));
      w.pc = 0, w.mask = w.live = ALL, w.carry = 0, w.group_count = 0, w.at_barrier = w.done = w.tried = false;
      w.meeting = std::numeric_limits<i32>::max();
      w.copies.clear(), w.products.clear(), w.tensor_stores.clear(), w.tensor_products.clear(), w.commits.clear();
    }
    run_block(block, table, random);
    if (launch->fault_totals[ENDLESS]) return;
  }
}
}
