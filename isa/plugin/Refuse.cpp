// Refuses what cannot mean the same on every instruction set: inline assembly, target intrinsics, and constructs
// that have no neutral form yet. An assembly text without instructions is only a barrier for the compiler and stays.
#include "Passes.h"
#include "Program.h"
#include "llvm/IR/InlineAsm.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/Support/Process.h"
#include "llvm/Support/raw_ostream.h"

using namespace llvm;

namespace godwit {
namespace {

// Nothing but blanks and comments as arm64's assembler knows them, which take the rest of their line.
bool hasNoInstructions(StringRef Text) {
  while (!Text.empty()) {
    auto [Line, Rest] = Text.split('\n');
    Line = Line.trim();
    if (!Line.empty() && !Line.starts_with("#") && !Line.starts_with("//"))
      return false;
    Text = Rest;
  }
  return true;
}

// The text of such a barrier is taken away, since another set's assembler may not see a comment in it.
void refuseAssembly(CallBase &Call, const InlineAsm &Asm, Refusals &Refused) {
  if (!hasNoInstructions(Asm.getAsmString()))
    Refused.add(Call, "inline assembly exists for one instruction set only; build with the C version of this code");
  else if (!Asm.getAsmString().empty())
    Call.setCalledOperand(InlineAsm::get(Asm.getFunctionType(), "", Asm.getConstraintString(), Asm.hasSideEffects(),
                                         Asm.isAlignStack(), Asm.getDialect(), Asm.canThrow()));
}

void refuseCall(CallBase &Call, Refusals &Refused) {
  if (const auto *Asm = dyn_cast<InlineAsm>(Call.getCalledOperand())) {
    refuseAssembly(Call, *Asm, Refused);
    return;
  }
  const Function *Callee = calleeOf(Call);
  if (Callee && Callee->isIntrinsic() && Callee->isTargetIntrinsic())
    Refused.add(Call, "the intrinsic " + Callee->getName() +
                          " belongs to one instruction set; build with the C version of this code");
  if (Call.isMustTailCall())
    Refused.add(Call, "a call that must be a tail call (musttail) leaves no place to return early to");
  if (isa<CallBrInst>(Call))
    Refused.add(Call, "asm goto exists for one instruction set only; build with the C version of this code");
  if (isa<IntrinsicInst>(Call))
    switch (cast<IntrinsicInst>(Call).getIntrinsicID()) {
    case Intrinsic::frameaddress:
    case Intrinsic::addressofreturnaddress:
    case Intrinsic::sponentry:
      Refused.add(Call, "the address of a native stack frame does not exist after a move");
      break;
    case Intrinsic::eh_sjlj_setjmp:
    case Intrinsic::eh_sjlj_longjmp:
      Refused.add(Call, "__builtin_setjmp and __builtin_longjmp keep registers; use setjmp and longjmp");
      break;
    default:
      break;
    }
}

} // namespace

PreservedAnalyses RefusePass::run(Module &M, ModuleAnalysisManager &) {
  Refusals Refused("gw-refuse");
  for (Function &F : M) {
    for (Instruction &I : instructions(F)) {
      if (auto *Call = dyn_cast<CallBase>(&I))
        refuseCall(*Call, Refused);
      if (I.getType()->isX86_FP80Ty() || I.getType()->isScalableTy())
        Refused.add(I, "a value of a type that only one instruction set has");
    }
  }
  if (!M.getModuleInlineAsm().empty()) {
    StringRef First = StringRef(M.getModuleInlineAsm()).trim().split('\n').first;
    errs() << "error: " << M.getSourceFileName() << ": assembly outside of functions (\"" << First
           << "\") exists for one instruction set only [gw-refuse]\n";
    sys::Process::Exit(1);
  }
  Refused.exitIfAny();
  return PreservedAnalyses::none();
}

} // namespace godwit
