// Registers the passes with opt: `opt -load-pass-plugin libgodwit-isa.so -passes=gw-before,default<O2>,gw-after`; and
// with clang (`-fpass-plugin=`) what its own optimiser needs.
#include "Passes.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Passes/PassPlugin.h"

using namespace llvm;

namespace godwit {

static bool addPass(StringRef Name, ModulePassManager &MPM) {
  // Everything that comes before the optimiser, and everything after it.
  if (Name == "gw-before")
    return addPass("gw-prepare", MPM) && addPass("gw-refuse", MPM) && addPass("gw-varargs", MPM) &&
           addPass("gw-computed-goto", MPM);
  if (Name == "gw-after")
    return addPass("gw-constructors", MPM) && addPass("gw-thread-local", MPM) && addPass("gw-thunks", MPM) &&
           addPass("gw-exceptions", MPM) && addPass("gw-setjmp", MPM) && addPass("gw-data-stack", MPM) &&
           addPass("gw-dilute", MPM) && addPass("gw-polls", MPM) && addPass("gw-capture", MPM) &&
           addPass("gw-globals", MPM) && addPass("gw-verify", MPM);

  // The same in part, to be measured: without polls, without tests behind calls, without saving.
  if (Name == "gw-after-data-stack" || Name == "gw-after-polls" || Name == "gw-after-checks") {
    for (StringRef Pass :
         {"gw-constructors", "gw-thread-local", "gw-thunks", "gw-exceptions", "gw-setjmp", "gw-data-stack"})
      addPass(Pass, MPM);
    if (Name != "gw-after-data-stack")
      for (StringRef Pass : {"gw-dilute", "gw-polls"})
        addPass(Pass, MPM);
    return addPass(Name == "gw-after-checks" ? "gw-capture-checks" : "gw-capture-nothing", MPM) &&
           addPass("gw-globals", MPM);
  }

  if (Name == "gw-quad")
    MPM.addPass(QuadPass());
  else if (Name == "gw-prepare")
    MPM.addPass(PreparePass());
  else if (Name == "gw-refuse")
    MPM.addPass(RefusePass());
  else if (Name == "gw-varargs")
    MPM.addPass(VarargsPass());
  else if (Name == "gw-computed-goto")
    MPM.addPass(ComputedGotoPass());
  else if (Name == "gw-constructors")
    MPM.addPass(ConstructorsPass());
  else if (Name == "gw-thread-local")
    MPM.addPass(ThreadLocalPass());
  else if (Name == "gw-thunks")
    MPM.addPass(ThunksPass());
  else if (Name == "gw-exceptions")
    MPM.addPass(ExceptionsPass());
  else if (Name == "gw-exceptions-plain")
    MPM.addPass(ExceptionsPass(Moves::Never));
  else if (Name == "gw-setjmp")
    MPM.addPass(SetJumpPass());
  else if (Name == "gw-data-stack")
    MPM.addPass(DataStackPass());
  else if (Name == "gw-dilute")
    MPM.addPass(DilutePass());
  else if (Name == "gw-polls")
    MPM.addPass(PollsPass());
  else if (Name == "gw-capture")
    MPM.addPass(CapturePass());
  else if (Name == "gw-capture-checks")
    MPM.addPass(CapturePass(Amount::Checks));
  else if (Name == "gw-capture-nothing")
    MPM.addPass(CapturePass(Amount::Nothing));
  else if (Name == "gw-globals")
    MPM.addPass(GlobalsPass());
  else if (Name == "gw-verify")
    MPM.addPass(VerifyPass());
  else
    return false;
  return true;
}

} // namespace godwit

extern "C" LLVM_ATTRIBUTE_WEAK PassPluginLibraryInfo llvmGetPassPluginInfo() {
  return {LLVM_PLUGIN_API_VERSION, "godwit-isa", "1", [](PassBuilder &PB) {
            PB.registerPipelineParsingCallback(
                [](StringRef Name, ModulePassManager &MPM, ArrayRef<PassBuilder::PipelineElement>) {
                  return godwit::addPass(Name, MPM);
                });
            PB.registerPipelineStartEPCallback(
                [](ModulePassManager &MPM, OptimizationLevel) { godwit::addPass("gw-quad", MPM); });
          }};
}
