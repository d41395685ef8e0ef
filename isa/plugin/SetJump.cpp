// setjmp and longjmp over early returns. A jmp_buf holds the identity of an activation (the address of a local of it,
// which lies on the data stack) and the number of the setjmp in its function, so it means the same on every set.
//
// setjmp saves the values that are live behind it into the frame, as the real one saves registers. longjmp starts an
// early return of all frames; the one it names does not return but goes to its landing, which reloads the values and
// goes on behind the setjmp. After each call the question "is a longjmp to me on its way?" stands as a call of
// __gw_jump_pending, which the capture pass moves off the hot path.
//
// A fault interrupts a function in mid-instruction, where nothing returns early. So in a program that calls sigsetjmp
// each function with a setjmp drops an anchor when it begins: a call that returns once more, to the landing, when the
// handler of a fault below it has called longjmp. Clones drop theirs anew (CloneBody.cpp). The innermost anchor is a
// field of the thread's control block, and each has the one before it.
#include "Frame.h"
#include "Liveness.h"
#include "Passes.h"
#include "Program.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/Transforms/Utils/BasicBlockUtils.h"

using namespace llvm;

namespace godwit {
namespace {

bool isSetJump(StringRef Name) {
  return Name == "setjmp" || Name == "_setjmp" || Name == "sigsetjmp" || Name == "__sigsetjmp";
}

// Whoever leaves the handler of a fault wants its mask back, and has to name it.
bool keepsMask(StringRef Name) { return Name == "sigsetjmp" || Name == "__sigsetjmp"; }

bool isLongJump(StringRef Name) { return Name == "longjmp" || Name == "_longjmp" || Name == "siglongjmp"; }

class Lowering {
public:
  Lowering(Function &F, ArrayRef<CallInst *> SetJumps, bool HasAnchors)
      : F(F), M(*F.getParent()), C(F.getContext()), SetJumps(SetJumps), HasAnchors(HasAnchors) {}
  void run();

private:
  void askAfterCalls();
  void lower(CallInst *Call, PHINode *Result, unsigned Number, const Liveness &Live);
  void dropAnchor();

  Function &F;
  Module &M;
  LLVMContext &C;
  ArrayRef<CallInst *> SetJumps;
  bool HasAnchors;
  AllocaInst *Identity = nullptr;
  BasicBlock *Landing = nullptr;
  SwitchInst *Which = nullptr;
  Value *Landed = nullptr;
  MapVector<Value *, SmallVector<std::pair<BasicBlock *, Value *>>> Reloads;
};

void Lowering::askAfterCalls() {
  FunctionCallee Pending = M.getOrInsertFunction(name::JumpPending, Type::getInt1Ty(C), PointerType::get(C, 0));
  SmallVector<CallInst *> Calls;
  for (Instruction &I : instructions(F))
    if (auto *Call = dyn_cast<CallInst>(&I); Call && isRealCall(*Call) && !is_contained(SetJumps, Call)) {
      Function *Callee = calleeOf(*Call);
      if (!Callee || isPolled(*Callee) || startsEarlyReturn(*Callee))
        Calls.push_back(Call);
    }
  for (CallInst *Call : Calls) {
    Call->removeFnAttr(Attribute::NoReturn);
    Call->setTailCallKind(CallInst::TCK_None);
    BasicBlock *Behind = SplitBlock(Call->getParent(), Call->getNextNode());
    Instruction *Jump = Call->getParent()->getTerminator();
    IRBuilder<> B(Jump);
    B.CreateCondBr(B.CreateCall(Pending, {Identity}), Landing, Behind);
    Jump->eraseFromParent();
  }
}

void Lowering::lower(CallInst *Call, PHINode *Result, unsigned Number, const Liveness &Live) {
  BasicBlock *Behind = Result->getParent();
  std::vector<Value *> Saved;
  for (Value *V : Live.liveIn(Behind)) {
    auto *Alloca = dyn_cast<AllocaInst>(V);
    if (!(Alloca && Alloca->isStaticAlloca()))
      Saved.push_back(V);
  }
  Frame Layout(std::move(Saved), M.getDataLayout());

  IRBuilder<> Entry(&*F.getEntryBlock().begin());
  AllocaInst *Record = Entry.CreateAlloca(ArrayType::get(Entry.getInt8Ty(), std::max<uint64_t>(Layout.size(), 8)),
                                          nullptr, "gw.jump.record");
  Record->setAlignment(Align(16));

  IRBuilder<> B(Call);
  Layout.store(B, Record);
  FunctionCallee SetJump =
      M.getOrInsertFunction(name::SetJump, B.getVoidTy(), B.getPtrTy(), B.getPtrTy(), B.getInt32Ty(), B.getInt32Ty());
  Value *KeepMask = Call->arg_size() > 1 ? Call->getArgOperand(1) : B.getInt32(0);
  B.CreateCall(SetJump, {Call->getArgOperand(0), Identity, B.getInt32(Number), KeepMask});

  auto *Land = BasicBlock::Create(C, "gw.land", &F);
  B.SetInsertPoint(Land);
  std::vector<Value *> Loaded = Layout.load(B, Record);
  for (auto [V, L] : zip(Layout.values(), Loaded))
    Reloads[V].push_back({Land, L});
  Result->addIncoming(B.CreateTrunc(Landed, B.getInt32Ty(), "gw.jump.value"), Land);
  B.CreateBr(Behind);
  Which->addCase(ConstantInt::get(IntegerType::get(C, 32), Number), Land);
  Call->eraseFromParent();
}

// Between the locals of the entry and the rest of it; and every return takes it up.
void Lowering::dropAnchor() {
  BasicBlock &Entry = F.getEntryBlock();
  SmallVector<AllocaInst *> Locals;
  for (Instruction &I : Entry)
    if (auto *Alloca = dyn_cast<AllocaInst>(&I); Alloca && Alloca->isStaticAlloca())
      Locals.push_back(Alloca);
  for (AllocaInst *Local : reverse(Locals))
    Local->moveBefore(Entry, Entry.begin());
  IRBuilder<> B(&Entry, Entry.begin());
  AllocaInst *Anchor = B.CreateAlloca(ArrayType::get(B.getInt8Ty(), AnchorSize), nullptr, "gw.anchor");
  Anchor->setAlignment(Align(16));
  BasicBlock *Rest = SplitBlock(&Entry, Entry.getFirstNonPHIOrDbgOrAlloca());
  Instruction *Jump = Entry.getTerminator();
  B.SetInsertPoint(Jump);
  CallInst *Drop =
      B.CreateCall(M.getOrInsertFunction(name::Anchor, B.getInt32Ty(), B.getPtrTy(), B.getPtrTy()), {Anchor, Identity});
  Drop->addFnAttr(Attribute::ReturnsTwice);
  B.CreateCondBr(B.CreateIsNotNull(Drop), Landing, Rest);
  Jump->eraseFromParent();
  for (BasicBlock &BB : F)
    if (auto *Return = dyn_cast<ReturnInst>(BB.getTerminator())) {
      B.SetInsertPoint(Return);
      B.CreateStore(B.CreateLoad(B.getPtrTy(), Anchor), threadField(B, OffAnchors));
    }
}

void Lowering::run() {
  // The call's result: zero the first time, longjmp's value when landed.
  SmallVector<PHINode *> Results;
  for (CallInst *Call : SetJumps) {
    BasicBlock *Behind = SplitBlock(Call->getParent(), Call->getNextNode());
    auto *Result = PHINode::Create(Call->getType(), 2, "gw.jump.result", Behind->begin());
    Call->replaceAllUsesWith(Result);
    Result->addIncoming(ConstantInt::get(Call->getType(), 0), Call->getParent());
    Results.push_back(Result);
  }
  Liveness Live(F);

  IRBuilder<> B(&*F.getEntryBlock().begin());
  Identity = B.CreateAlloca(B.getInt64Ty(), nullptr, "gw.jump.identity");
  Landing = BasicBlock::Create(C, "gw.landing", &F);
  auto *Never = BasicBlock::Create(C, "gw.no.landing", &F);
  IRBuilder<>(Never).CreateUnreachable();
  B.SetInsertPoint(Landing);
  Landed = B.CreateCall(M.getOrInsertFunction(name::Landed, B.getInt64Ty()), {}, "gw.landed");
  Which = B.CreateSwitch(B.CreateTrunc(B.CreateLShr(Landed, 32), B.getInt32Ty()), Never, SetJumps.size());

  askAfterCalls();
  for (unsigned I = 0; I < SetJumps.size(); ++I)
    lower(SetJumps[I], Results[I], I, Live);
  for (auto &[V, More] : Reloads) {
    auto *Inst = dyn_cast<Instruction>(V);
    addDefinitions(V, Inst ? Inst->getParent() : &F.getEntryBlock(), More);
  }
  if (HasAnchors)
    dropAnchor();
  F.removeFnAttr(Attribute::ReturnsTwice);
}

} // namespace

PreservedAnalyses SetJumpPass::run(Module &M, ModuleAnalysisManager &) {
  Refusals Refused("gw-setjmp");
  uint64_t Count = 0;
  LLVMContext &C = M.getContext();
  for (Function &F : make_early_inc_range(M)) {
    if (!isPrivate(F) || !isLongJump(F.getName()))
      continue;
    FunctionCallee LongJump =
        M.getOrInsertFunction(name::LongJump, Type::getVoidTy(C), PointerType::get(C, 0), Type::getInt32Ty(C));
    F.replaceAllUsesWith(LongJump.getCallee());
  }
  bool HasAnchors = any_of(M, [](Function &F) { return isPrivate(F) && keepsMask(F.getName()) && !F.use_empty(); });
  for (Function &F : M) {
    SmallVector<CallInst *> SetJumps;
    for (Instruction &I : instructions(F))
      if (auto *Call = dyn_cast<CallInst>(&I))
        if (Function *Callee = calleeOf(*Call); Callee && isPrivate(*Callee) && isSetJump(Callee->getName()))
          SetJumps.push_back(Call);
    if (SetJumps.empty())
      continue;
    if (!isPolled(F)) {
      Refused.add(*SetJumps.front(), "a function that never suspends cannot use setjmp");
      continue;
    }
    Count += SetJumps.size();
    Lowering(F, SetJumps, HasAnchors).run();
  }
  for (Function &F : M)
    if (isPrivate(F) && isSetJump(F.getName()) && !F.use_empty())
      Refused.add(F, "the address of setjmp cannot be taken");
  Refused.exitIfAny();
  report("setjmp", {{"calls", Count}});
  return PreservedAnalyses::none();
}

} // namespace godwit
