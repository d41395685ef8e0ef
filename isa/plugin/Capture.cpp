// Makes functions suspendable. Behind every call that may suspend stands a test of the thread's state; if it is not
// zero, the frame (site and live values) goes to the continuation buffer and the function returns, so its caller does
// the same. A clone of each such function, cold and apart, goes on from its sites (Resume.cpp).
//
//     %r = call @f(…)                     cold:  %p = call @__gw_push(site)
//     %s = load state                            store live values to %p
//     br %s != 0, cold, behind                   ret poison
//
// A poll is such a call of __gw_poll_slow behind a test of the request. A call in tail position has no site: when its
// callee returns early, returning right away is all there is to do.
#include "Liveness.h"
#include "Passes.h"
#include "Program.h"
#include "Sites.h"
#include "Slots.h"
#include "llvm/ADT/DenseSet.h"
#include "llvm/ADT/PostOrderIterator.h"
#include "llvm/ADT/SetVector.h"
#include "llvm/ADT/StringSwitch.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/MDBuilder.h"
#include "llvm/IR/Verifier.h"
#include "llvm/Transforms/Utils/BasicBlockUtils.h"
#include "llvm/Transforms/Utils/Local.h"

using namespace llvm;

namespace godwit {

void branchOnState(IRBuilderBase &B, BasicBlock *Cold, BasicBlock *Behind) {
  Value *State = B.CreateLoad(B.getInt32Ty(), threadField(B, OffState), "gw.state");
  MDNode *Unlikely = MDBuilder(B.getContext()).createBranchWeights(1, 1U << 20);
  B.CreateCondBr(B.CreateIsNotNull(State), Cold, Behind, Unlikely);
}

namespace {

class Capture {
public:
  Capture(Module &M, Amount Wanted) : M(M), C(M.getContext()), Wanted(Wanted) {}
  void run();

private:
  void findSuspendable();
  bool maySuspend(const CallBase &Call) const;
  AttributeList withoutFacts(const AttributeList &Of, unsigned Arguments) const;
  std::vector<Site> findSites(Function &F);
  void choose(Site &S, const Liveness &Live, Refusals &Refused) const;
  void putCommonFirst(MutableArrayRef<Site> Sites) const;
  std::optional<Slots> layOut(Function &F, MutableArrayRef<Site> Sites);
  void addTest(Function &F, Site &S);
  void dropJumpPending(Function &F);
  void defineTable();

  Module &M;
  LLVMContext &C;
  Amount Wanted;
  SmallSetVector<Function *, 32> Suspendable;
  bool IndirectSuspends = false;
  // For each site: the clone that goes on from it, and the bytes of its frame.
  std::vector<std::pair<Function *, uint64_t>> Table;
  uint64_t SavedValues = 0, DerivedValues = 0, TailCalls = 0, InMemory = 0;
};

bool Capture::maySuspend(const CallBase &Call) const {
  if (!isRealCall(Call))
    return false;
  Function *Callee = calleeOf(Call);
  if (!Callee)
    return IndirectSuspends;
  return startsEarlyReturn(*Callee) || Suspendable.contains(Callee);
}

void Capture::findSuspendable() {
  DenseMap<Function *, SmallVector<Function *, 4>> Callers;
  SmallVector<Function *> CallAnyone;
  for (Function &F : M) {
    if (!isPolled(F))
      continue;
    for (Instruction &I : instructions(F)) {
      auto *Call = dyn_cast<CallBase>(&I);
      if (!Call || !isRealCall(*Call))
        continue;
      Function *Callee = calleeOf(*Call);
      if (!Callee)
        CallAnyone.push_back(&F);
      else if (startsEarlyReturn(*Callee))
        Suspendable.insert(&F);
      else
        Callers[Callee].push_back(&F);
    }
  }
  DenseSet<Function *> Taken;
  for (Function *F : addressTaken(M))
    Taken.insert(F);
  // The set grows while it is walked, which no iterator would survive.
  // NOLINTNEXTLINE(modernize-loop-convert)
  for (unsigned I = 0; I < Suspendable.size(); ++I) {
    Function *F = Suspendable[I];
    Suspendable.insert(Callers[F].begin(), Callers[F].end());
    if (!IndirectSuspends && Taken.contains(F)) {
      IndirectSuspends = true;
      Suspendable.insert(CallAnyone.begin(), CallAnyone.end());
    }
  }
}

// The attributes that say how code is made, and nothing of what it does.
bool saysHowToMakeCode(Attribute A) {
  if (A.isStringAttribute()) {
    StringRef Kind = A.getKindAsString();
    return Kind.starts_with("no-builtin") ||
           StringSwitch<bool>(Kind)
               .Cases("approx-func-fp-math", "denormal-fp-math", "denormal-fp-math-f32", "less-precise-fpmad",
                      "no-infs-fp-math", true)
               .Cases("no-jump-tables", "no-nans-fp-math", "no-signed-zeros-fp-math", "no-trapping-math",
                      "patchable-function-entry", true)
               .Cases("prefer-vector-width", "reciprocal-estimates", "strict-float-cast-overflow", "unsafe-fp-math",
                      "zero-call-used-regs", true)
               .Default(false);
  }
  switch (A.getKindAsEnum()) {
  case Attribute::AlwaysInline:
  case Attribute::Cold:
  case Attribute::Hot:
  case Attribute::InlineHint:
  case Attribute::MinSize:
  case Attribute::NoBuiltin:
  case Attribute::NoImplicitFloat:
  case Attribute::NoInline:
  case Attribute::NoRedZone:
  case Attribute::NullPointerIsValid:
  case Attribute::OptimizeForSize:
  case Attribute::OptimizeNone:
  case Attribute::StrictFP:
    return true;
  default:
    return false;
  }
}

// What the optimiser has found out about a function or a call holds for a whole run, not for one that returns early. So
// only what is known to say nothing of that is kept, and how arguments are passed: a fact of a later LLVM is left out.
AttributeList Capture::withoutFacts(const AttributeList &Of, unsigned Arguments) const {
  AttrBuilder Kept(C);
  for (Attribute A : Of.getFnAttrs())
    if (saysHowToMakeCode(A))
      Kept.addAttribute(A);
  AttributeList Clean = AttributeList().addFnAttributes(C, Kept);
  for (unsigned I = 0; I < Arguments; ++I) {
    AttrBuilder Passing(C);
    for (Attribute::AttrKind Kind : {Attribute::ZExt, Attribute::SExt, Attribute::InReg})
      if (Of.hasParamAttr(I, Kind))
        Passing.addAttribute(Kind);
    Clean = Clean.addParamAttributes(C, I, Passing);
  }
  return Clean;
}

std::vector<Site> Capture::findSites(Function &F) {
  std::vector<Site> Sites;
  SmallVector<CallInst *> Calls;
  for (Instruction &I : instructions(F))
    if (auto *Call = dyn_cast<CallInst>(&I); Call && maySuspend(*Call))
      Calls.push_back(Call);
  for (CallInst *Call : Calls) {
    Call->setAttributes(withoutFacts(Call->getAttributes(), Call->arg_size()));
    // Metadata of a call are facts as well.
    Call->dropUnknownNonDebugMetadata();
    Instruction *Next = Call->getNextNonDebugInstruction();
    auto *Return = dyn_cast<ReturnInst>(Next);
    if (Return && (!Return->getReturnValue() || Return->getReturnValue() == Call)) {
      ++TailCalls;
      continue;
    }
    Call->setTailCallKind(CallInst::TCK_None);
    Site S;
    S.Call = Call;
    S.Head = Call->getParent();
    S.Behind = SplitBlock(S.Head, Call->getNextNode());
    Sites.push_back(std::move(S));
  }
  return Sites;
}

// Clones that have to merge more values than this, counted over all sites, keep them in memory: what the code
// generators need for the merging grows faster than its size.
constexpr size_t MostMerged = 30;

// A value that few instructions make from other live values is cheaper made again in the clone than saved.
bool isDerivable(const Instruction &I) {
  if (isa<GetElementPtrInst, CastInst, CmpInst, SelectInst>(I))
    return true;
  const auto *Binary = dyn_cast<BinaryOperator>(&I);
  return Binary && !Binary->isIntDivRem();
}

void Capture::choose(Site &S, const Liveness &Live, Refusals &Refused) const {
  std::vector<Value *> All = Live.liveIn(S.Behind);
  erase(All, S.Call);
  DenseSet<Value *> Known(All.begin(), All.end());
  std::vector<Value *> Saved;
  for (Value *V : All) {
    auto *I = dyn_cast<Instruction>(V);
    // Every operand is live as well, so it is either saved or derived itself: in SSA form every cycle of definitions
    // and uses passes through a phi, which is saved.
    bool Derived = I && isDerivable(*I) && all_of(I->operands(), [&](const Use &U) {
                     return isa<Constant>(U.get()) || Known.contains(U.get());
                   });
    if (Derived)
      S.Derived.push_back(I);
    else
      Saved.push_back(V);
    if (V->getType()->isTokenTy() || V->getType()->isMetadataTy() || V->getType()->isLabelTy())
      Refused.add(*S.Call, "a value of a type without bytes is live across this call");
  }
  S.Saved = Frame(std::move(Saved), M.getDataLayout());
}

// A number for each instruction. Definitions dominate uses, and a block comes before those that it dominates, so each
// value that is no phi has a higher one than its operands.
DenseMap<const Instruction *, unsigned> numberInstructions(Function &F) {
  DenseMap<const Instruction *, unsigned> Number;
  for (const BasicBlock *BB : ReversePostOrderTraversal<Function *>(&F))
    for (const Instruction &I : *BB)
      Number.try_emplace(&I, Number.size());
  return Number;
}

// What most sites save gets the lowest offsets, so that it is at the same ones in most frames (Saves.cpp).
void Capture::putCommonFirst(MutableArrayRef<Site> Sites) const {
  DenseMap<Value *, unsigned> Users;
  for (const Site &S : Sites)
    for (Value *V : S.Saved.values())
      ++Users[V];
  for (Site &S : Sites) {
    std::vector<Value *> Saved = S.Saved.values().vec();
    stable_sort(Saved, [&](Value *A, Value *B) { return Users.lookup(A) > Users.lookup(B); });
    S.Saved = Frame(std::move(Saved), M.getDataLayout());
  }
}

// Decides between a clone in registers, with a frame of its own for each site, and one in memory.
std::optional<Slots> Capture::layOut(Function &F, MutableArrayRef<Site> Sites) {
  size_t Merged = 0;
  for (const Site &S : Sites)
    Merged += S.Saved.values().size();
  std::optional<Slots> Places;
  if (Merged > MostMerged) {
    ++InMemory;
    // Such a clone does the same at all sites, so what one of them saves is saved by all.
    DenseSet<Value *> Anywhere;
    for (const Site &S : Sites)
      Anywhere.insert(S.Saved.values().begin(), S.Saved.values().end());
    for (Site &S : Sites) {
      std::vector<Value *> Saved = S.Saved.values().vec();
      copy_if(S.Derived, std::back_inserter(Saved), [&](Instruction *I) { return Anywhere.contains(I); });
      erase_if(S.Derived, [&](Instruction *I) { return Anywhere.contains(I); });
      S.Saved = Frame(std::move(Saved), M.getDataLayout());
    }
    Places.emplace(F, Sites);
    for (Site &S : Sites)
      S.Saved = Frame(S.Saved.values().vec(), [&](Value *V) { return Places->offset(V); }, M.getDataLayout());
  }
  if (!Places)
    putCommonFirst(Sites);
  DenseMap<const Instruction *, unsigned> Number = numberInstructions(F);
  for (Site &S : Sites) {
    sort(S.Derived, [&](Instruction *A, Instruction *B) { return Number.lookup(A) < Number.lookup(B); });
    SavedValues += S.Saved.values().size();
    DerivedValues += S.Derived.size();
    S.Id = Table.size();
    Table.emplace_back(&F, S.Saved.size());
  }
  return Places;
}

bool isJumpPending(const Instruction &I) {
  const auto *Call = dyn_cast<CallInst>(&I);
  const Function *Callee = Call ? calleeOf(*Call) : nullptr;
  return Callee && Callee->getName() == name::JumpPending;
}

// The question that SetJump.cpp asks behind each call of a function that uses setjmp, or Exceptions.cpp behind one that
// may throw. In front of it may be the address that it asks for.
CallInst *jumpPending(BasicBlock &Behind) {
  Instruction *First = Behind.getFirstNonPHIOrDbg();
  while (isa<GetElementPtrInst>(First))
    First = First->getNextNonDebugInstruction();
  return isJumpPending(*First) ? cast<CallInst>(First) : nullptr;
}

// In a function that uses setjmp or has landing pads, what may come to it is looked for before the frame is given up.
// Where both is so, one question follows the other.
void Capture::addTest(Function &F, Site &S) {
  S.Cold = S.Save;
  BranchInst *Last = nullptr;
  for (BasicBlock *At = S.Behind; CallInst *Pending = jumpPending(*At);) {
    auto *Branch = cast<BranchInst>(At->getTerminator());
    BasicBlock *Landing = Branch->getSuccessor(0);
    auto *Cold = BasicBlock::Create(C, "gw.jump", &F);
    IRBuilder<> B(Cold);
    Value *Identity = Pending->getArgOperand(0);
    if (auto *Address = dyn_cast<Instruction>(Identity); Address && Address->getParent() == At)
      Identity = B.Insert(Address->clone());
    Value *Target = B.CreateLoad(B.getPtrTy(), threadField(B, OffJumpFrame));
    BranchInst *Test = B.CreateCondBr(B.CreateICmpEQ(Target, Identity), Landing, S.Save);
    if (Last)
      Last->setSuccessor(1, Cold);
    else
      S.Cold = Cold;
    Last = Test;
    BasicBlock *Next = Branch->getSuccessor(1);
    IRBuilder<>(Branch).CreateBr(Next);
    Branch->eraseFromParent();
    Pending->eraseFromParent();
    At = Next;
    if (!At->getSinglePredecessor())
      break;
  }

  S.Head->getTerminator()->eraseFromParent();
  IRBuilder<> B(S.Head);
  branchOnState(B, S.Cold, S.Behind);
}

// The questions behind calls that turned out never to suspend.
void Capture::dropJumpPending(Function &F) {
  for (Instruction &I : make_early_inc_range(instructions(F)))
    if (auto *Call = dyn_cast<CallInst>(&I))
      if (Function *Callee = calleeOf(*Call); Callee && Callee->getName() == name::JumpPending) {
        Call->replaceAllUsesWith(ConstantInt::getFalse(C));
        Call->eraseFromParent();
      }
}

// __gw_sites: for each site the clone's address and the size of the frame, 32 bits each. Addresses are below 2 GiB.
void Capture::defineTable() {
  Type *I32 = Type::getInt32Ty(C);
  Type *I64 = Type::getInt64Ty(C);
  auto *Entry = StructType::get(I32, I32);
  std::vector<Constant *> Entries;
  for (auto [Clone, Size] : Table) {
    Constant *Address = ConstantExpr::getTrunc(ConstantExpr::getPtrToInt(Clone, I64), I32);
    Entries.push_back(ConstantStruct::get(Entry, {Address, ConstantInt::get(I32, Size)}));
  }
  auto *ArrayTy = ArrayType::get(Entry, Entries.size());
  auto Define = [&](StringRef Name, Constant *Value) {
    auto *G = new GlobalVariable(M, Value->getType(), true, GlobalValue::ExternalLinkage, Value, Name);
    G->setSection(".gw.sites");
    G->setAlignment(Align(8));
  };
  Define(name::Sites, ConstantArray::get(ArrayTy, Entries));
  Define(name::SiteCount, ConstantInt::get(I64, Table.size()));
}

void Capture::run() {
  Refusals Refused("gw-capture");
  if (Wanted != Amount::Nothing)
    findSuspendable();
  for (Function *F : Suspendable)
    F->setAttributes(withoutFacts(F->getAttributes(), F->arg_size()));

  for (Function *F : Suspendable) {
    std::vector<Site> Sites = findSites(*F);
    if (Sites.empty())
      continue;
    unsigned First = Table.size();
    Liveness Live(*F);
    for (Site &S : Sites)
      if (Wanted == Amount::Everything)
        choose(S, Live, Refused);
    Refused.exitIfAny();
    std::optional<Slots> Places = layOut(*F, Sites);
    makeSaves(*F, Sites);
    for (Site &S : Sites)
      addTest(*F, S);
    dropJumpPending(*F);
    if (Wanted != Amount::Everything)
      continue;
    Function *Clone = Places ? makeResumeCloneInMemory(*F, Sites, *Places) : makeResumeClone(*F, Sites);
    for (unsigned I = First; I < Table.size(); ++I)
      Table[I].first = Clone;
    removeUnreachableBlocks(*F);
    for (Function *Made : {F, Clone})
      if (verifyFunction(*Made, &errs()))
        report_fatal_error("gw-capture made an invalid function of '" + F->getName() + "'");
  }
  for (Function &F : M)
    if (!F.isDeclaration())
      dropJumpPending(F);
  defineTable();
  report("capture", {{"suspendable", Suspendable.size()},
                     {"sites", Table.size()},
                     {"tail-calls", TailCalls},
                     {"clones-in-memory", InMemory},
                     {"saved-values", SavedValues},
                     {"derived-values", DerivedValues}});
}

} // namespace

PreservedAnalyses CapturePass::run(Module &M, ModuleAnalysisManager &) {
  Capture(M, Wanted).run();
  return PreservedAnalyses::none();
}

} // namespace godwit
