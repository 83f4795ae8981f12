// Runs one program of the CPU kernels in a process of its own, for levels that only an emulator has.
//
// In: the number of threads, of regions and of instructions, and the addresses of instructions, step and
// arena; then of each region its address, its length and its bytes. Addresses are those of the process that
// asks, and are found in the regions. Out: the regions' bytes. tests/cpu/emulated.py has the other side.

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>

#include "program.h"

extern "C" {
Team* sgla_team(int threads);
void sgla_team_free(Team* t);
void sgla_run(Team* t, const Instr* program, int64_t length, const Step* step, char* arena);
const char* sgla_isa();
}

namespace {

struct Region {
  uint64_t address, length;
  char* here;
};

std::vector<Region> regions;

void take(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(3);
}

// The place here of an address there.
template <class T>
T* moved(const T* there) {
  uint64_t address = (uint64_t)there;
  for (const Region& r : regions)
    if (address >= r.address && address < r.address + r.length) return (T*)(r.here + (address - r.address));
  if (address) std::exit(4);
  return nullptr;
}

}  // namespace

int main(int count, char**) {
  if (count > 1) return std::puts(sgla_isa()) < 0;
  struct {
    uint64_t threads, regions, length, code, step, arena;
  } head;
  take(&head, sizeof head);
  for (uint64_t i = 0; i < head.regions; i++) {
    Region r{};
    take(&r, 2 * sizeof(uint64_t));
    r.here = (char*)std::aligned_alloc(64, r.length / 64 * 64 + 64 * 64);  // kernels fetch beyond the end
    take(r.here, r.length);
    regions.push_back(r);
  }
  Instr* code = moved((Instr*)head.code);
  std::vector<Instr> program(code, code + head.length);
  for (Instr& instr : program) {
    if (instr.op == DRAW && !instr.a[0]) instr.p[0] = nullptr;
    for (const void*& p : instr.p) p = moved((const char*)p);
    if (instr.op == ROPE_STORE || instr.op == ATTENTION)  // k and v
      for (int64_t& a : {std::ref(instr.a[6]), std::ref(instr.a[7])}) a = (int64_t)moved((char*)a);
  }
  Step step = *moved((Step*)head.step);
  for (const int32_t** p : {&step.ids, &step.positions, &step.slots, &step.q_start, &step.kv_len, &step.out_loc,
                            &step.page_table, &step.sample_rows})
    *p = moved(*p);
  Team* team = sgla_team((int)head.threads);
  sgla_run(team, program.data(), (int64_t)program.size(), &step, moved((char*)head.arena));
  sgla_team_free(team);
  for (const Region& r : regions)
    if (std::fwrite(r.here, 1, r.length, stdout) != r.length) return 5;
  return 0;
}
