// Fibers: one stack a CUDA thread and a hand-written switch that saves only what the calling convention preserves.
#pragma once
#include <cstddef>
#include <cstdint>
#include <sys/mman.h>

// Saves the caller's registers and stack pointer in *save and continues where `load` was saved.
extern "C" __attribute__((visibility("hidden"))) void emu_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
  .text
  .p2align 4
  .globl emu_switch
  .hidden emu_switch
  .type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emu_switch, . - emu_switch
)");
#elif defined(__aarch64__)
asm(R"(
  .text
  .p2align 4
  .globl emu_switch
  .hidden emu_switch
  .type emu_switch, %function
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size emu_switch, . - emu_switch
)");
#else
#error "emu_switch is written for x86-64 and aarch64"
#endif

namespace emu {

constexpr std::size_t kStackBytes = 256 * 1024;  // reserved for each thread; only touched pages cost memory
constexpr std::size_t kStackGuard = 4096;        // unmapped below each stack

// The stack pointer of a fiber that begins in `entry` (which never returns) on the stack [low, low + kStackBytes).
// `colour` staggers the first frames, or the hot lines of all stacks would share a few cache sets.
inline void* fresh_stack(char* low, unsigned colour, void (*entry)()) {
  auto top = reinterpret_cast<std::uintptr_t>(low) + kStackBytes - 64 - (colour % 61u) * 192u;
  top &= ~std::uintptr_t{63};
  auto* words = reinterpret_cast<std::uintptr_t*>(top);
#if defined(__x86_64__)
  words -= 8;  // six registers, the address that `ret` takes, a null return address above it
  for (int i = 0; i < 8; ++i) words[i] = 0;
  words[6] = reinterpret_cast<std::uintptr_t>(entry);
#else
  words -= 20;  // x19-x28, x29, x30, d8-d15
  for (int i = 0; i < 20; ++i) words[i] = 0;
  words[11] = reinterpret_cast<std::uintptr_t>(entry);
#endif
  return words;
}

}  // namespace emu
