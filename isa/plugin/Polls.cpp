// Places the polls: a load of the thread's request and a branch that is hardly ever taken. The promise is that no cycle
// of control flow is without one, so that a request is honoured after a bounded stretch of straight code:
//
//   calls  Every cycle of the call graph holds a function that polls at its entry, or an indirect call with a poll in
//          front of it. (An indirect call may reach every function whose address is taken.)
//   loops  Every cycle in a function holds a poll or a call of a function that polls on all its ways. First natural
//          loops, at their latches; whatever cycles are left, which are the irreducible ones, at a block of each.
//
// A function "surely polls" when no path from its entry to a return avoids polls; that one of its callees polls on
// some path is not enough: a recursive function's base case used to be taken for a poll and was none.
// Innermost loops of at most MostSilentTrips trips without calls have none; they are bounded. No poll may come to lie
// in one either, say for a loop around it that it goes back to: a resumed function would enter the silent loop there,
// so it would not be the loop whose trips were counted.
#include "Graph.h"
#include "Passes.h"
#include "Program.h"
#include "llvm/ADT/PostOrderIterator.h"
#include "llvm/ADT/SCCIterator.h"
#include "llvm/Analysis/CallGraph.h"
#include "llvm/Analysis/LoopInfo.h"
#include "llvm/Analysis/ScalarEvolution.h"
#include "llvm/IR/CFG.h"
#include "llvm/IR/Dominators.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/MDBuilder.h"
#include "llvm/Transforms/Utils/BasicBlockUtils.h"

using namespace llvm;

namespace godwit {
namespace {

class Polls {
public:
  Polls(Module &M, FunctionAnalysisManager &FAM) : M(M), FAM(FAM) {}
  void run();

private:
  void insert(Instruction *Before, StringRef Kind);
  void askForJump(Function &F, Instruction &Branch);
  void breakCallCycles();
  void breakLoops(Function &F);
  bool polls(const BasicBlock &BB) const;
  bool surelyPolls(Function &F) const;
  bool isSilent(const Loop &L, ScalarEvolution &SE) const;
  struct Choice;
  Choice choose(Function &F, const SmallPtrSetImpl<const Loop *> &Heard) const;
  Instruction *latchPoint(BasicBlock &Latch) const;
  Instruction *blockPoint(BasicBlock &BB) const;

  Module &M;
  FunctionAnalysisManager &FAM;
  SmallPtrSet<const Function *, 32> Sure;
  uint64_t AtEntry = 0, AtCall = 0, AtLatch = 0, AtIrreducible = 0, Silent = 0;
};

void Polls::insert(Instruction *Before, StringRef Kind) {
  LLVMContext &C = M.getContext();
  IRBuilder<> B(Before);
  LoadInst *Request = B.CreateLoad(B.getInt32Ty(), threadField(B, OffRequest), "gw.request");
  Request->setVolatile(true);
  MDNode *Unlikely = MDBuilder(C).createBranchWeights(1, 1U << 20);
  Instruction *Then = SplitBlockAndInsertIfThen(B.CreateIsNotNull(Request), Before->getIterator(), false, Unlikely);
  cast<Instruction>(Request)->getParent()->getTerminator()->setMetadata(PollMetadata,
                                                                        MDNode::get(C, MDString::get(C, Kind)));
  B.SetInsertPoint(Then);
  CallInst *Slow = B.CreateCall(M.getOrInsertFunction(name::Poll, B.getVoidTy()));
  Slow->setCallingConv(CallingConv::PreserveAll);
  // The handler of a signal may run in the poll, and jump to this function.
  if (Kind != "entry")
    askForJump(*Then->getFunction(), *Then);
}

// As the setjmp pass does behind the calls that it finds.
void Polls::askForJump(Function &F, Instruction &Branch) {
  CallInst *SetJump = nullptr;
  BasicBlock *Landing = nullptr;
  for (Instruction &I : instructions(F))
    if (auto *Call = dyn_cast<CallInst>(&I))
      if (const Function *Callee = calleeOf(*Call)) {
        if (Callee->getName() == name::SetJump)
          SetJump = Call;
        else if (Callee->getName() == name::Landed && Call->getName().starts_with("gw.landed"))
          Landing = Call->getParent();
      }
  if (!SetJump || !Landing)
    return;
  IRBuilder<> B(&Branch);
  FunctionCallee Pending = M.getOrInsertFunction(name::JumpPending, B.getInt1Ty(), B.getPtrTy());
  BasicBlock *Behind = Branch.getSuccessor(0);
  // The data-stack pass has computed the address of the identity in front of the call of setjmp; its base is known
  // here.
  Value *Identity = SetJump->getArgOperand(1);
  if (const auto *Address = dyn_cast<GetElementPtrInst>(Identity))
    Identity = B.Insert(Address->clone());
  B.CreateCondBr(B.CreateCall(Pending, {Identity}), Landing, Behind);
  for (PHINode &Phi : Landing->phis())
    Phi.addIncoming(PoisonValue::get(Phi.getType()), Branch.getParent());
  Branch.eraseFromParent();
}

void Polls::breakCallCycles() {
  // The last node stands for "some function whose address is taken".
  SmallVector<Function *> Functions;
  DenseMap<Function *, unsigned> Number;
  for (Function &F : M)
    if (isPolled(F)) {
      Number[&F] = Functions.size();
      Functions.push_back(&F);
    }
  unsigned Anyone = Functions.size();
  Graph Calls(Anyone + 1);
  for (Function *F : addressTaken(M))
    if (auto It = Number.find(F); It != Number.end())
      Calls.addEdge(Anyone, It->second);
  SmallVector<SmallVector<CallBase *, 4>> Indirect(Functions.size());
  for (unsigned I = 0; I < Functions.size(); ++I)
    for (Instruction &Inst : instructions(Functions[I]))
      if (auto *Call = dyn_cast<CallBase>(&Inst); Call && isRealCall(*Call)) {
        Function *Callee = calleeOf(*Call);
        if (!Callee) {
          Indirect[I].push_back(Call);
          Calls.addEdge(I, Anyone);
        } else if (auto It = Number.find(Callee); It != Number.end()) {
          Calls.addEdge(I, It->second);
        }
      }

  SmallPtrSet<Function *, 32> CallAnyone;
  for (const std::vector<unsigned> &Cycle : Calls.cycles())
    if (is_contained(Cycle, Anyone))
      for (unsigned I : Cycle)
        if (I != Anyone && !Indirect[I].empty())
          CallAnyone.insert(Functions[I]);
  Calls.remove(Anyone);

  SmallPtrSet<Function *, 32> Entry;
  for (unsigned I : Calls.breakCycles())
    Entry.insert(Functions[I]);
  for (unsigned I = 0; I < Functions.size(); ++I) {
    Function *F = Functions[I];
    if (Entry.contains(F)) {
      insert(&*F->getEntryBlock().getFirstInsertionPt(), "entry");
      Sure.insert(F);
      ++AtEntry;
    } else if (CallAnyone.contains(F)) {
      for (CallBase *Call : Indirect[I]) {
        insert(Call, "call");
        ++AtCall;
      }
    }
  }
}

bool Polls::polls(const BasicBlock &BB) const {
  if (BB.getTerminator()->hasMetadata(PollMetadata))
    return true;
  return any_of(BB, [&](const Instruction &I) {
    const auto *Call = dyn_cast<CallBase>(&I);
    const Function *Callee = Call && isRealCall(*Call) ? calleeOf(*Call) : nullptr;
    return Callee && Sure.contains(Callee);
  });
}

bool Polls::surelyPolls(Function &F) const {
  SmallVector<BasicBlock *> Work = {&F.getEntryBlock()};
  SmallPtrSet<BasicBlock *, 32> Seen = {&F.getEntryBlock()};
  while (!Work.empty()) {
    BasicBlock *BB = Work.pop_back_val();
    if (polls(*BB))
      continue;
    // What ends without a return may end in a longjmp, which comes back as well.
    if (succ_empty(BB))
      return false;
    for (BasicBlock *Next : successors(BB))
      if (Seen.insert(Next).second)
        Work.push_back(Next);
  }
  return true;
}

bool Polls::isSilent(const Loop &L, ScalarEvolution &SE) const {
  if (!L.isInnermost())
    return false;
  unsigned Trips = SE.getSmallConstantMaxTripCount(&L);
  if (Trips == 0 || Trips > MostSilentTrips)
    return false;
  return none_of(L.blocks(), [](const BasicBlock *BB) {
    return any_of(*BB, [](const Instruction &I) {
      const auto *Call = dyn_cast<CallBase>(&I);
      if (!Call || !isRealCall(*Call))
        return false;
      const Function *Callee = calleeOf(*Call);
      return !Callee || !isPrivate(*Callee);
    });
  });
}

// Before the comparison rather than after it, so that comparison and branch stay one fused instruction.
Instruction *Polls::latchPoint(BasicBlock &Latch) const {
  auto *Branch = dyn_cast<BranchInst>(Latch.getTerminator());
  if (!Branch || !Branch->isConditional())
    return Latch.getTerminator();
  auto *Compare = dyn_cast<CmpInst>(Branch->getCondition());
  if (!Compare || Compare->getParent() != &Latch || !Compare->hasOneUse())
    return Latch.getTerminator();
  Compare->moveBefore(Branch);
  return Compare;
}

// A longjmp is over only behind the call that lands it, so no poll may come before. Nor may one come between a call and
// the second question behind it, which has a block of its own: there the place is in front of the call.
Instruction *Polls::blockPoint(BasicBlock &BB) const {
  auto CalleeName = [](const Instruction &I) {
    const auto *Call = dyn_cast<CallBase>(&I);
    const Function *Callee = Call ? calleeOf(*Call) : nullptr;
    return Callee ? Callee->getName() : StringRef();
  };
  Instruction *First = &*BB.getFirstInsertionPt();
  if (CalleeName(*First) == name::Landed)
    return First->getNextNode();
  if (CalleeName(*First) != name::JumpPending)
    return First;
  for (Instruction &I : reverse(*BB.getSinglePredecessor()))
    if (const auto *Call = dyn_cast<CallBase>(&I); Call && isRealCall(*Call) && CalleeName(I) != name::JumpPending)
      return &I;
  report_fatal_error("gw-polls: a question has no call");
}

// Where polls go that break a function's cycles, and which loops need none.
struct Polls::Choice {
  SmallVector<BasicBlock *> AtLatches, Irreducible;
  SmallVector<const Loop *> Silent;
};

// The loops in Heard have a poll, though they might do without.
Polls::Choice Polls::choose(Function &F, const SmallPtrSetImpl<const Loop *> &Heard) const {
  auto &LI = FAM.getResult<LoopAnalysis>(F);
  auto &SE = FAM.getResult<ScalarEvolutionAnalysis>(F);
  Choice C;

  SmallVector<BasicBlock *> Blocks;
  DenseMap<const BasicBlock *, unsigned> Number;
  BitVector Polled;
  for (BasicBlock &BB : F) {
    Number[&BB] = Blocks.size();
    Blocks.push_back(&BB);
    Polled.push_back(polls(BB));
  }
  DenseSet<std::pair<unsigned, unsigned>> SilentEdges;

  // Inner loops first: a poll on every way through an inner loop's header spares the outer one's.
  SmallVector<Loop *> Loops = to_vector(LI.getLoopsInPreorder());
  for (Loop *L : reverse(Loops)) {
    unsigned Header = Number[L->getHeader()];
    SmallVector<BasicBlock *> Latches;
    L->getLoopLatches(Latches);
    if (!Heard.contains(L) && isSilent(*L, SE)) {
      for (BasicBlock *Latch : Latches)
        SilentEdges.insert({Number[Latch], Header});
      C.Silent.push_back(L);
      continue;
    }
    // Which latches can be reached from the header, inside the loop, around all polls?
    SmallPtrSet<BasicBlock *, 16> Reached;
    SmallVector<BasicBlock *> Work;
    auto Reach = [&](BasicBlock *BB) {
      if (L->contains(BB) && !Polled[Number[BB]] && Reached.insert(BB).second)
        Work.push_back(BB);
    };
    Reach(L->getHeader());
    while (!Work.empty())
      for (BasicBlock *Next : successors(Work.pop_back_val()))
        Reach(Next);
    for (BasicBlock *Latch : Latches)
      if (Reached.contains(Latch)) {
        C.AtLatches.push_back(Latch);
        Polled.set(Number[Latch]);
      }
  }

  Graph Left(Blocks.size());
  for (unsigned I = 0; I < Blocks.size(); ++I) {
    if (Polled[I])
      Left.remove(I);
    for (BasicBlock *Next : successors(Blocks[I]))
      if (!SilentEdges.contains({I, Number[Next]}))
        Left.addEdge(I, Number[Next]);
  }
  for (unsigned I : Left.breakCycles())
    C.Irreducible.push_back(Blocks[I]);
  return C;
}

void Polls::breakLoops(Function &F) {
  SmallPtrSet<const Loop *, 4> Heard;
  Choice C = choose(F, Heard);
  for (bool Changed = true; Changed;) {
    Changed = false;
    for (const Loop *L : C.Silent)
      if (any_of(concat<BasicBlock *>(C.AtLatches, C.Irreducible), [&](BasicBlock *BB) { return L->contains(BB); }))
        Changed |= Heard.insert(L).second;
    if (Changed)
      C = choose(F, Heard);
  }

  AtLatch += C.AtLatches.size();
  AtIrreducible += C.Irreducible.size();
  Silent += C.Silent.size();
  for (const Loop *L : C.Silent) {
    SmallVector<BasicBlock *> Latches;
    L->getLoopLatches(Latches);
    for (BasicBlock *Latch : Latches)
      Latch->getTerminator()->setMetadata(SilentMetadata, MDNode::get(M.getContext(), {}));
  }
  SmallVector<Instruction *> Irreducible;
  for (BasicBlock *BB : C.Irreducible)
    Irreducible.push_back(blockPoint(*BB));
  for (BasicBlock *Latch : C.AtLatches)
    insert(latchPoint(*Latch), "latch");
  for (Instruction *Before : Irreducible)
    insert(Before, "irreducible");
}

void Polls::run() {
  breakCallCycles();
  // Callees first, so that what surely polls is known where it is called.
  CallGraph CG(M);
  for (auto It = scc_begin(&CG); !It.isAtEnd(); ++It)
    for (CallGraphNode *Node : *It) {
      Function *F = Node->getFunction();
      if (!F || !isPolled(*F))
        continue;
      FAM.invalidate(*F, PreservedAnalyses::none());
      breakLoops(*F);
      FAM.invalidate(*F, PreservedAnalyses::none());
      if (surelyPolls(*F))
        Sure.insert(F);
    }
  report("polls", {{"entry", AtEntry},
                   {"call", AtCall},
                   {"latch", AtLatch},
                   {"irreducible", AtIrreducible},
                   {"silent-loops", Silent}});
}

} // namespace

PreservedAnalyses PollsPass::run(Module &M, ModuleAnalysisManager &MAM) {
  auto &FAM = MAM.getResult<FunctionAnalysisManagerModuleProxy>(M).getManager();
  Polls(M, FAM).run();
  return PreservedAnalyses::none();
}

} // namespace godwit
