// Keeps LLVM 19 from computing a function of a `long double` constant where it would crash: built with a logf128 (on
// Debian 13 and Ubuntu 24.04), it asks a description of the library for the function's name that some passes do not
// give it. A call that is no builtin is left alone by all of them, and is the library's function in the end.
#include "Passes.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/InstrTypes.h"
#include "llvm/IR/Module.h"

using namespace llvm;

namespace godwit {

PreservedAnalyses QuadPass::run(Module &M, ModuleAnalysisManager &) {
  for (Function &F : M)
    for (Instruction &I : instructions(F))
      if (auto *Call = dyn_cast<CallBase>(&I); Call && Call->getType()->isFP128Ty() && Call->arg_size() == 1)
        Call->addFnAttr(Attribute::NoBuiltin);
  return PreservedAnalyses::none();
}

} // namespace godwit
