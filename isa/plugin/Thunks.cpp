// The address of a private function differs between the sets, so a program must never hold one: where it takes the
// address of `memcpy`, it gets the address of a neutral function that calls it. Marked code may not suspend either:
// a call from a function marked so to one that may suspend is refused here, where all functions are known.
#include "Passes.h"
#include "Program.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"

using namespace llvm;

namespace godwit {
namespace {

Function *makeThunk(Function &Private) {
  Module &M = *Private.getParent();
  auto *Thunk =
      Function::Create(Private.getFunctionType(), GlobalValue::InternalLinkage, "__gw_thunk_" + Private.getName(), &M);
  Thunk->addFnAttr(NoSuspendAttr);
  Thunk->addFnAttr(Attribute::NoInline);
  IRBuilder<> B(BasicBlock::Create(M.getContext(), "", Thunk));
  SmallVector<Value *> Args;
  for (Argument &A : Thunk->args())
    Args.push_back(&A);
  CallInst *Call = B.CreateCall(Private.getFunctionType(), &Private, Args);
  if (Private.getReturnType()->isVoidTy())
    B.CreateRetVoid();
  else
    B.CreateRet(Call);
  return Thunk;
}

void checkNoSuspend(Function &F, Refusals &Refused) {
  for (Instruction &I : instructions(F)) {
    auto *Call = dyn_cast<CallBase>(&I);
    if (!Call || !isRealCall(*Call))
      continue;
    Function *Callee = calleeOf(*Call);
    if (!Callee)
      Refused.add(I, "a function that never suspends makes an indirect call, which may suspend");
    else if (isPolled(*Callee) || startsEarlyReturn(*Callee))
      Refused.add(I, "a function that never suspends calls '" + Callee->getName() + "', which may suspend");
  }
}

} // namespace

PreservedAnalyses ThunksPass::run(Module &M, ModuleAnalysisManager &) {
  Refusals Refused("gw-thunks");
  uint64_t Thunks = 0;
  for (Function *F : addressTaken(M)) {
    if (!isPrivate(*F))
      continue;
    // A weak function that nobody defines is null in every executable.
    if (F->hasExternalWeakLinkage()) {
      F->replaceAllUsesWith(ConstantPointerNull::get(F->getType()));
      continue;
    }
    Function *Thunk = makeThunk(*F);
    F->replaceUsesWithIf(Thunk, [&](Use &U) {
      auto *Call = dyn_cast<CallBase>(U.getUser());
      return !(Call && Call->isCallee(&U));
    });
    ++Thunks;
  }
  for (GlobalVariable &G : make_early_inc_range(M.globals()))
    if (G.isDeclaration() && G.hasExternalWeakLinkage()) {
      G.replaceAllUsesWith(ConstantPointerNull::get(G.getType()));
      G.eraseFromParent();
    }
  for (Function &F : M)
    if (!F.isDeclaration() && F.hasFnAttribute(NoSuspendAttr))
      checkNoSuspend(F, Refused);
  Refused.exitIfAny();
  report("thunks", {{"thunks", Thunks}});
  return PreservedAnalyses::none();
}

} // namespace godwit
