// The last look before the code generators: nothing that a move would break may be left. It trusts no earlier pass and
// finds what it needs by itself.
//
//   native stack   no alloca but a clone's slots, no frame address, no byval: so no value points into a native stack
//   private code   no address of a private function in a value or in memory, other than to call it
//   polls          every cycle of a polled function's blocks meets a poll or a call of the program, or is a loop that
//                  the polls pass has marked as short and counted
//   exceptions     nothing unwinds a native stack: a throw is an early return
//   early return   behind every call that may suspend the state is tested, or the function returns
#include "Graph.h"
#include "Passes.h"
#include "Program.h"
#include "llvm/ADT/DenseMap.h"
#include "llvm/Analysis/LoopInfo.h"
#include "llvm/IR/CFG.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/IR/Verifier.h"

using namespace llvm;

namespace godwit {
namespace {

// The slots of a clone (ResumeInMemory.cpp): memory that only the clone's loads and stores and the copying of frames
// see, so that its address is never a value that lives across a move.
bool areSlots(const AllocaInst &Alloca) {
  if (!Alloca.getFunction()->getSection().starts_with(".text.gw.") || !Alloca.isStaticAlloca())
    return false;
  SmallVector<const Value *> Addresses = {&Alloca};
  while (!Addresses.empty())
    for (const Use &U : Addresses.pop_back_val()->uses()) {
      if (const auto *GEP = dyn_cast<GetElementPtrInst>(U.getUser()); GEP && GEP->hasAllConstantIndices()) {
        Addresses.push_back(GEP);
        continue;
      }
      const auto *Store = dyn_cast<StoreInst>(U.getUser());
      const auto *Call = dyn_cast<CallBase>(U.getUser());
      const Function *Callee = Call ? calleeOf(*Call) : nullptr;
      bool Copies = Callee && (Callee->getName() == name::Unpack || Callee->getName() == name::Repack);
      bool Stores = Store && U.getOperandNo() == StoreInst::getPointerOperandIndex();
      if (!isa<LoadInst>(U.getUser()) && !Stores && !Copies)
        return false;
    }
  return true;
}

void checkNativeStack(Function &F, Refusals &Refused) {
  for (Argument &A : F.args())
    if (A.hasByValAttr() || A.hasInAllocaAttr())
      Refused.add(F, "an argument lies on the native stack");
  for (Instruction &I : instructions(F)) {
    if (const auto *Alloca = dyn_cast<AllocaInst>(&I); Alloca && !areSlots(*Alloca))
      Refused.add(I, "a local variable is left on the native stack");
    if (auto *II = dyn_cast<IntrinsicInst>(&I))
      switch (II->getIntrinsicID()) {
      case Intrinsic::frameaddress:
      case Intrinsic::addressofreturnaddress:
      case Intrinsic::sponentry:
      case Intrinsic::stacksave:
      case Intrinsic::stackrestore:
      case Intrinsic::returnaddress:
        Refused.add(I, "the address of native code or of a native stack is used");
        break;
      default:
        break;
      }
  }
}

void checkExceptions(Function &F, Refusals &Refused) {
  for (Instruction &I : instructions(F))
    if (isa<InvokeInst>(I) || isa<ResumeInst>(I) || I.isEHPad())
      Refused.add(I, "an exception would unwind the native stack");
}

bool testsState(const Instruction &Next) {
  const auto *Load = dyn_cast<LoadInst>(&Next);
  return Load && Load->getName().starts_with("gw.state");
}

// The instruction behind the call, not looking at the computation of the control block's address.
const Instruction *behind(const CallBase &Call) {
  const Instruction *Next = Call.getNextNonDebugInstruction();
  while (Next &&
         (isa<GetElementPtrInst>(Next) ||
          (isa<IntrinsicInst>(Next) && cast<IntrinsicInst>(Next)->getIntrinsicID() == Intrinsic::thread_pointer)))
    Next = Next->getNextNonDebugInstruction();
  return Next;
}

// A defined function that tests the state anywhere may return early, whatever the earlier passes thought of it.
bool returnsEarly(const Function &F) {
  return any_of(instructions(F), [](const Instruction &I) {
    if (testsState(I))
      return true;
    const auto *Call = dyn_cast<CallBase>(&I);
    const Function *Callee = Call && isRealCall(*Call) ? calleeOf(*Call) : nullptr;
    return Callee && startsEarlyReturn(*Callee);
  });
}

void checkEarlyReturn(Function &F, const SmallPtrSetImpl<const Function *> &Early, Refusals &Refused) {
  for (Instruction &I : instructions(F)) {
    auto *Call = dyn_cast<CallBase>(&I);
    if (!Call || !isRealCall(*Call))
      continue;
    Function *Callee = calleeOf(*Call);
    if (!Callee || !(startsEarlyReturn(*Callee) || Early.contains(Callee)))
      continue;
    const Instruction *Next = behind(*Call);
    if (!isa<ReturnInst>(Next) && !testsState(*Next))
      Refused.add(I, "the early return of '" + Callee->getName() + "' would go unnoticed");
  }
}

bool pollsOrCalls(const BasicBlock &BB) {
  return BB.getTerminator()->hasMetadata(PollMetadata) || any_of(BB, [](const Instruction &I) {
           const auto *Call = dyn_cast<CallBase>(&I);
           if (!Call || !isRealCall(*Call))
             return false;
           const Function *Callee = calleeOf(*Call);
           return !Callee || isPolled(*Callee) || startsEarlyReturn(*Callee);
         });
}

void checkPolls(Function &F, const LoopInfo &LI, Refusals &Refused) {
  SmallVector<BasicBlock *> Blocks;
  DenseMap<const BasicBlock *, unsigned> Number;
  for (BasicBlock &BB : F) {
    Number[&BB] = Blocks.size();
    Blocks.push_back(&BB);
  }
  Graph Silent(Blocks.size());
  for (unsigned I = 0; I < Blocks.size(); ++I) {
    if (pollsOrCalls(*Blocks[I]))
      Silent.remove(I);
    const Loop *L = Blocks[I]->getTerminator()->hasMetadata(SilentMetadata) ? LI.getLoopFor(Blocks[I]) : nullptr;
    for (BasicBlock *Next : successors(Blocks[I]))
      if (!L || Next != L->getHeader())
        Silent.addEdge(I, Number[Next]);
  }
  for (const std::vector<unsigned> &Cycle : Silent.cycles())
    Refused.add(Blocks[Cycle.front()]->front(), "a loop without a poll is left");
}

} // namespace

PreservedAnalyses VerifyPass::run(Module &M, ModuleAnalysisManager &MAM) {
  auto &FAM = MAM.getResult<FunctionAnalysisManagerModuleProxy>(M).getManager();
  Refusals Refused("gw-verify");
  if (verifyModule(M, &errs()))
    report_fatal_error("gw-verify: the passes made an invalid module");
  for (Function *F : addressTaken(M))
    if (isPrivate(*F) && !F->hasExternalWeakLinkage())
      Refused.add(*F, "the address of private code is used as a value");
  SmallPtrSet<const Function *, 32> Early;
  for (Function &F : M)
    if (!F.isDeclaration() && returnsEarly(F))
      Early.insert(&F);
  uint64_t Functions = 0;
  for (Function &F : M) {
    if (F.isDeclaration())
      continue;
    checkNativeStack(F, Refused);
    checkExceptions(F, Refused);
    checkEarlyReturn(F, Early, Refused);
    if (isPolled(F))
      checkPolls(F, FAM.getResult<LoopAnalysis>(F), Refused);
    ++Functions;
  }
  for (GlobalVariable &G : M.globals())
    if (G.isThreadLocal())
      Refused.add(G, "a thread-local variable is left");
  Refused.exitIfAny();
  report("verify", {{"functions", Functions}});
  return PreservedAnalyses::none();
}

} // namespace godwit
