// The passes in the order in which they run. Each stands in a file of its own, which says what it does.
#pragma once

#include "llvm/IR/PassManager.h"
#include <cstdint>

namespace godwit {

#define GODWIT_PASS(Name)                                                                                              \
  struct Name : llvm::PassInfoMixin<Name> {                                                                            \
    static bool isRequired() { return true; }                                                                          \
    llvm::PreservedAnalyses run(llvm::Module &M, llvm::ModuleAnalysisManager &MAM);                                    \
  }

// At the begin of any optimiser, the front end's too.
GODWIT_PASS(QuadPass); // gw-quad
// Before the optimiser.
GODWIT_PASS(PreparePass);      // gw-prepare
GODWIT_PASS(RefusePass);       // gw-refuse
GODWIT_PASS(VarargsPass);      // gw-varargs
GODWIT_PASS(ComputedGotoPass); // gw-computed-goto
// After it.
GODWIT_PASS(ConstructorsPass); // gw-constructors
GODWIT_PASS(ThreadLocalPass);  // gw-thread-local
GODWIT_PASS(ThunksPass);       // gw-thunks
GODWIT_PASS(SetJumpPass);      // gw-setjmp
GODWIT_PASS(DataStackPass);    // gw-data-stack
GODWIT_PASS(DilutePass);       // gw-dilute
GODWIT_PASS(PollsPass);        // gw-polls
GODWIT_PASS(GlobalsPass);      // gw-globals
GODWIT_PASS(VerifyPass);       // gw-verify

#undef GODWIT_PASS

// How much of it a program gets: less than everything is for measuring what the parts cost (isa/bench), and cannot
// move.
enum class Amount : uint8_t {
  Nothing,    // gw-capture-nothing: an empty table of sites
  Checks,     // gw-capture-checks: the tests behind calls, with nothing that saves or resumes
  Everything, // gw-capture
};

// Whether the program can move. One that never does (--plain) has no early return to take exceptions along.
enum class Moves : uint8_t { Never, Ever };

struct ExceptionsPass : llvm::PassInfoMixin<ExceptionsPass> {
  explicit ExceptionsPass(Moves Wanted = Moves::Ever) : Wanted(Wanted) {}
  static bool isRequired() { return true; }
  // gw-exceptions, gw-exceptions-plain; between gw-thunks and gw-setjmp
  llvm::PreservedAnalyses run(llvm::Module &M, llvm::ModuleAnalysisManager &MAM);

private:
  Moves Wanted;
};

struct CapturePass : llvm::PassInfoMixin<CapturePass> {
  explicit CapturePass(Amount Wanted = Amount::Everything) : Wanted(Wanted) {}
  static bool isRequired() { return true; }
  llvm::PreservedAnalyses run(llvm::Module &M, llvm::ModuleAnalysisManager &MAM);

private:
  Amount Wanted;
};

} // namespace godwit
