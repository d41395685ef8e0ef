// Exceptions over early returns. A throw calls __gw_leave, which starts an early return of all frames, as longjmp does;
// the first function that has a landing pad for the call it made takes it. So nothing is asked where no exception is on
// its way but what is asked for a capture anyway, and no tables of native code are needed.
//
//     invoke @f() to N unwind L     call @f()
//                                   br __gw_jump_pending(exception), landed, N      (the capture pass moves it off
//                                                                                    the hot path)
//                           landed: take the exception, put the data stack back; br L
//
// A landing pad asks libc++abi which of its handlers takes the exception (__gw_exception_select); `resume` leaves
// again. Between a landing and that nothing is on its way, so clean-ups can be captured, and throw, like all code.
//
// What cannot let exceptions through, as C without -fexceptions, is known by its attribute nounwind: one that comes to
// such a call ends the program there (__gw_exception_escapes).
//
// Programs that never move have no early return. There the question follows each call that may throw, and reads the
// state itself.
#include "Passes.h"
#include "Program.h"
#include "llvm/ADT/DenseSet.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/ADT/SetVector.h"
#include "llvm/IR/AttributeMask.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/Transforms/Utils/BasicBlockUtils.h"
#include "llvm/Transforms/Utils/Local.h"

using namespace llvm;

namespace godwit {
namespace {

// What an exception goes to, in the place of an activation that called setjmp: never the address of a local.
Constant *anyLanding(LLVMContext &C) {
  return ConstantExpr::getIntToPtr(ConstantInt::get(Type::getInt64Ty(C), 1), PointerType::get(C, 0));
}

class Exceptions {
public:
  Exceptions(Module &M, Moves Wanted) : M(M), C(M.getContext()), Wanted(Wanted), Leave(M.getFunction(name::Leave)) {}
  void run();

private:
  void findThrowing();
  bool mayThrow(const CallBase &Call) const;
  void lower(Function &F);
  void lowerInvoke(InvokeInst *Invoke);
  void lowerLandingPad(LandingPadInst *Pad);
  void lowerResume(ResumeInst *Resume, bool Escapes);
  void askBehind(CallInst *Call, bool Escapes);
  Value *pending(IRBuilder<> &B);
  Value *landed(IRBuilder<> &B);
  void escape(IRBuilder<> &B, Value *Exception);
  Value *dataStack(InvokeInst *Invoke);
  Constant *clausesOf(const LandingPadInst &Pad);
  uint64_t numberOf(Constant *Type);
  void replaceTypeNumbers();
  void defineLeave();

  Module &M;
  LLVMContext &C;
  Moves Wanted;
  Function *Leave;
  SmallSetVector<Function *, 32> Throwing;
  bool IndirectThrows = false;
  // Handlers know a type by its number, which is the same in all functions.
  MapVector<Constant *, uint64_t> Numbers;
  // Of the function at hand: the exception where it has landed, by block; and the data stack pointer behind its entry.
  DenseMap<BasicBlock *, Value *> Landed;
  Value *EntryStack = nullptr;
  uint64_t Invokes = 0, Pads = 0, Escapes = 0;
};

bool Exceptions::mayThrow(const CallBase &Call) const {
  if (!isRealCall(Call))
    return false;
  Function *Callee = calleeOf(Call);
  return Callee ? Callee == Leave || Throwing.contains(Callee) : IndirectThrows;
}

// A function throws if it makes a call that throws, and lets it: not if it has a handler for all, or is nounwind. That
// a landing pad may be left again shows in a resume.
void Exceptions::findThrowing() {
  DenseMap<Function *, SmallVector<Function *, 4>> Callers;
  SmallVector<Function *> CallAnyone;
  for (Function &F : M) {
    if (F.isDeclaration() || F.doesNotThrow())
      continue;
    bool Resumes = any_of(F, [](const BasicBlock &BB) { return isa<ResumeInst>(BB.getTerminator()); });
    for (Instruction &I : instructions(F)) {
      auto *Call = dyn_cast<CallBase>(&I);
      if (!Call || !isRealCall(*Call) || Call->doesNotThrow() || (isa<InvokeInst>(Call) && !Resumes))
        continue;
      Function *Callee = calleeOf(*Call);
      if (!Callee)
        CallAnyone.push_back(&F);
      else if (Callee == Leave)
        Throwing.insert(&F);
      else
        Callers[Callee].push_back(&F);
    }
  }
  DenseSet<Function *> Taken;
  for (Function *F : addressTaken(M))
    Taken.insert(F);
  // The set grows while it is walked, which no iterator would survive.
  // NOLINTNEXTLINE(modernize-loop-convert)
  for (unsigned I = 0; I < Throwing.size(); ++I) {
    Function *F = Throwing[I];
    Throwing.insert(Callers[F].begin(), Callers[F].end());
    if (!IndirectThrows && Taken.contains(F)) {
      IndirectThrows = true;
      Throwing.insert(CallAnyone.begin(), CallAnyone.end());
    }
  }
}

Value *Exceptions::pending(IRBuilder<> &B) {
  if (Wanted == Moves::Never)
    return B.CreateIsNotNull(B.CreateLoad(B.getInt32Ty(), threadField(B, OffState)));
  return B.CreateCall(M.getOrInsertFunction(name::JumpPending, B.getInt1Ty(), B.getPtrTy()), {anyLanding(C)});
}

// Ends the early return, and gives the exception: with a mark in its lowest bit, since longjmp has no value 0.
Value *Exceptions::landed(IRBuilder<> &B) {
  if (Wanted == Moves::Never) {
    B.CreateStore(B.getInt32(0), threadField(B, OffState));
    return B.CreateLoad(B.getPtrTy(), threadField(B, OffJumpFrame), "gw.exception");
  }
  Value *Marked = B.CreateCall(M.getOrInsertFunction(name::Landed, B.getInt64Ty()), {}, "gw.marked");
  return B.CreateIntToPtr(B.CreateAnd(Marked, B.getInt64(-2)), B.getPtrTy(), "gw.exception");
}

void Exceptions::escape(IRBuilder<> &B, Value *Exception) {
  B.CreateCall(M.getOrInsertFunction(name::ExceptionEscapes, B.getVoidTy(), B.getPtrTy()), {Exception});
  B.CreateUnreachable();
  ++Escapes;
}

// Where the function's data stack ends at this call. What it allocates as it runs is still there in a landing pad.
Value *Exceptions::dataStack(InvokeInst *Invoke) {
  Function &F = *Invoke->getFunction();
  bool Moves = any_of(instructions(F), [](const Instruction &I) {
    const auto *Alloca = dyn_cast<AllocaInst>(&I);
    return Alloca && !Alloca->isStaticAlloca();
  });
  if (!Moves && EntryStack)
    return EntryStack;
  BasicBlock::iterator Place = Invoke->getIterator();
  if (!Moves) {
    Place = F.getEntryBlock().getFirstInsertionPt();
    while (isa<AllocaInst>(*Place))
      ++Place;
  }
  IRBuilder<> B(Place->getParent(), Place);
  Value *Stack = B.CreateLoad(B.getPtrTy(), threadField(B, OffDataStack), "gw.stack.landing");
  if (!Moves)
    EntryStack = Stack;
  return Stack;
}

// The call may return without a result.
void forget(CallInst &Call) {
  Call.removeRetAttrs(AttributeFuncs::getUBImplyingAttributes());
  Call.removeFnAttr(Attribute::NoReturn);
  Call.removeFnAttr(Attribute::NoUnwind);
  Call.setTailCallKind(CallInst::TCK_None);
}

void Exceptions::lowerInvoke(InvokeInst *Invoke) {
  BasicBlock *Block = Invoke->getParent();
  BasicBlock *Normal = Invoke->getNormalDest();
  BasicBlock *Pad = Invoke->getUnwindDest();
  // A pad that never goes on needs no data stack of its own.
  bool Ends = isa<UnreachableInst>(Pad->getTerminator());
  Value *Stack = Ends || Wanted == Moves::Never ? nullptr : dataStack(Invoke);

  // Blocks of their own for both ways, so that later passes find nothing but the question behind the call.
  auto *Land = BasicBlock::Create(C, "gw.landed", Block->getParent(), Pad);
  auto *Behind = BasicBlock::Create(C, "gw.returned", Block->getParent(), Normal);
  IRBuilder<>(Behind).CreateBr(Normal);
  IRBuilder<> B(Land);
  Landed[Land] = landed(B);
  if (Stack)
    B.CreateStore(Stack, threadField(B, OffDataStack));
  B.CreateBr(Pad);
  Normal->replacePhiUsesWith(Block, Behind);
  Pad->replacePhiUsesWith(Block, Land);

  CallInst *Call = createCallMatchingInvoke(Invoke);
  Call->insertBefore(Invoke->getIterator());
  Call->takeName(Invoke);
  forget(*Call);
  Invoke->replaceAllUsesWith(Call);
  B.SetInsertPoint(Invoke);
  B.CreateCondBr(pending(B), Land, Behind);
  Invoke->eraseFromParent();
  ++Invokes;
}

// Behind a call without a landing pad: the program ends, or the function returns.
void Exceptions::askBehind(CallInst *Call, bool IsEscape) {
  Function &F = *Call->getFunction();
  forget(*Call);
  BasicBlock *Block = Call->getParent();
  BasicBlock *Behind = SplitBlock(Block, Call->getNextNode());
  auto *Out = BasicBlock::Create(C, "gw.out", &F);
  IRBuilder<> B(Out);
  if (IsEscape)
    escape(B, landed(B));
  else if (F.getReturnType()->isVoidTy())
    B.CreateRetVoid();
  else
    B.CreateRet(PoisonValue::get(F.getReturnType()));
  Instruction *Jump = Block->getTerminator();
  B.SetInsertPoint(Jump);
  B.CreateCondBr(pending(B), Out, Behind);
  Jump->eraseFromParent();
}

uint64_t Exceptions::numberOf(Constant *Type) {
  return Numbers.try_emplace(Type->stripPointerCasts(), Numbers.size() + 1).first->second;
}

// libcxx/exceptions.cpp says what such a list is.
Constant *Exceptions::clausesOf(const LandingPadInst &Pad) {
  Type *I64 = Type::getInt64Ty(C);
  auto *Pointer = PointerType::get(C, 0);
  auto *Entry = StructType::get(Pointer, I64);
  std::vector<Constant *> Entries;
  auto Add = [&](Constant *Type, int64_t Number) {
    Entries.push_back(ConstantStruct::get(Entry, {Type, ConstantInt::get(I64, Number)}));
  };
  for (unsigned I = 0; I < Pad.getNumClauses(); ++I) {
    Constant *Clause = Pad.getClause(I);
    if (Pad.isCatch(I)) {
      Add(Clause, static_cast<int64_t>(numberOf(Clause)));
      continue;
    }
    for (unsigned K = 0; K < cast<ArrayType>(Clause->getType())->getNumElements(); ++K)
      Add(Clause->getAggregateElement(K), 0);
    Add(ConstantPointerNull::get(Pointer), -1);
  }
  Add(ConstantPointerNull::get(Pointer), 0);
  auto *List = ConstantArray::get(ArrayType::get(Entry, Entries.size()), Entries);
  return new GlobalVariable(M, List->getType(), true, GlobalValue::InternalLinkage, List, "gw.clauses");
}

void Exceptions::lowerLandingPad(LandingPadInst *Pad) {
  BasicBlock *Block = Pad->getParent();
  IRBuilder<> B(Block, Block->begin());
  PHINode *Exception = B.CreatePHI(B.getPtrTy(), pred_size(Block), "gw.exception");
  for (BasicBlock *From : predecessors(Block))
    Exception->addIncoming(Landed.lookup(From), From);
  B.SetInsertPoint(Pad);
  Value *Selector = B.getInt32(0);
  if (Pad->getNumClauses() != 0)
    Selector = B.CreateCall(M.getOrInsertFunction(name::ExceptionSelect, B.getInt32Ty(), B.getPtrTy(), B.getPtrTy()),
                            {Exception, clausesOf(*Pad)}, "gw.selector");
  for (User *U : make_early_inc_range(Pad->users()))
    if (auto *Part = dyn_cast<ExtractValueInst>(U); Part && Part->getNumIndices() == 1) {
      Part->replaceAllUsesWith(Part->getIndices()[0] == 0 ? static_cast<Value *>(Exception) : Selector);
      Part->eraseFromParent();
    }
  if (!Pad->use_empty()) {
    Value *Both = B.CreateInsertValue(PoisonValue::get(Pad->getType()), Exception, 0);
    Pad->replaceAllUsesWith(B.CreateInsertValue(Both, Selector, 1));
  }
  Pad->eraseFromParent();
  ++Pads;
}

void Exceptions::lowerResume(ResumeInst *Resume, bool IsEscape) {
  IRBuilder<> B(Resume);
  Value *Exception = B.CreateExtractValue(Resume->getValue(), 0);
  Function &F = *Resume->getFunction();
  if (IsEscape) {
    escape(B, Exception);
  } else {
    B.CreateCall(M.getOrInsertFunction(name::Leave, B.getVoidTy(), B.getPtrTy()), {Exception});
    if (F.getReturnType()->isVoidTy())
      B.CreateRetVoid();
    else
      B.CreateRet(PoisonValue::get(F.getReturnType()));
  }
  Resume->eraseFromParent();
}

void Exceptions::lower(Function &F) {
  Landed.clear();
  EntryStack = nullptr;
  bool IsClosed = F.doesNotThrow();
  SmallVector<InvokeInst *> Quiet, Loud;
  SmallVector<std::pair<CallInst *, bool>> Asked;
  for (Instruction &I : instructions(F)) {
    auto *Call = dyn_cast<CallBase>(&I);
    if (auto *Invoke = dyn_cast<InvokeInst>(&I)) {
      (mayThrow(*Invoke) ? Loud : Quiet).push_back(Invoke);
    } else if (Call && mayThrow(*Call)) {
      bool IsEscape = IsClosed || Call->doesNotThrow();
      if (IsEscape || Wanted == Moves::Never)
        Asked.push_back({cast<CallInst>(Call), IsEscape});
    }
  }
  for (InvokeInst *Invoke : Quiet)
    changeToCall(Invoke);
  if (!Quiet.empty())
    removeUnreachableBlocks(F);
  // Some may have been in blocks that are gone.
  Loud.clear();
  SmallVector<LandingPadInst *> Landings;
  SmallVector<ResumeInst *> Resumes;
  for (Instruction &I : instructions(F)) {
    if (auto *Invoke = dyn_cast<InvokeInst>(&I))
      Loud.push_back(Invoke);
    else if (auto *Pad = dyn_cast<LandingPadInst>(&I))
      Landings.push_back(Pad);
    else if (auto *Resume = dyn_cast<ResumeInst>(&I))
      Resumes.push_back(Resume);
  }
  SmallPtrSet<Instruction *, 16> Left;
  for (Instruction &I : instructions(F))
    Left.insert(&I);
  for (InvokeInst *Invoke : Loud)
    lowerInvoke(Invoke);
  for (LandingPadInst *Pad : Landings)
    lowerLandingPad(Pad);
  for (ResumeInst *Resume : Resumes)
    lowerResume(Resume, IsClosed);
  for (auto [Call, IsEscape] : Asked)
    if (Left.contains(Call))
      askBehind(Call, IsEscape);
  if (F.hasPersonalityFn())
    F.setPersonalityFn(nullptr);
  // What the optimiser knows of a whole run does not hold for one that an exception ends.
  if (Throwing.contains(&F)) {
    F.removeFnAttr(Attribute::NoReturn);
    // Else the code generator of arm64 takes an early return for something that never happens.
    F.removeRetAttrs(AttributeFuncs::getUBImplyingAttributes());
  }
}

void Exceptions::replaceTypeNumbers() {
  for (Function &F : M)
    if (F.getIntrinsicID() == Intrinsic::eh_typeid_for)
      for (User *U : make_early_inc_range(F.users())) {
        auto *Call = cast<CallInst>(U);
        uint64_t Number = numberOf(cast<Constant>(Call->getArgOperand(0)));
        Call->replaceAllUsesWith(ConstantInt::get(Call->getType(), Number));
        Call->eraseFromParent();
      }
}

// The exception's address is the value that longjmp brings along: number and value of the setjmp in one.
void Exceptions::defineLeave() {
  if (!Leave)
    return;
  IRBuilder<> B(BasicBlock::Create(C, "", Leave));
  Value *Exception = Leave->getArg(0);
  if (Wanted == Moves::Never) {
    B.CreateStore(Exception, threadField(B, OffJumpFrame));
    B.CreateStore(B.getInt32(1), threadField(B, OffState));
    B.CreateRetVoid();
    return;
  }
  Value *Address = B.CreatePtrToInt(Exception, B.getInt64Ty());
  Value *Number = B.CreateTrunc(B.CreateLShr(Address, 32), B.getInt32Ty());
  Value *Marked = B.CreateTrunc(B.CreateOr(Address, 1), B.getInt32Ty());
  AllocaInst *Buffer = B.CreateAlloca(ArrayType::get(B.getInt64Ty(), 6));
  B.CreateCall(
      M.getOrInsertFunction(name::SetJump, B.getVoidTy(), B.getPtrTy(), B.getPtrTy(), B.getInt32Ty(), B.getInt32Ty()),
      {Buffer, anyLanding(C), Number, B.getInt32(0)});
  B.CreateCall(M.getOrInsertFunction(name::LongJump, B.getVoidTy(), B.getPtrTy(), B.getInt32Ty()), {Buffer, Marked});
  B.CreateRetVoid();
  Leave->removeFnAttr(Attribute::NoUnwind);
}

void Exceptions::run() {
  findThrowing();
  for (Function &F : M)
    if (!F.isDeclaration())
      lower(F);
  replaceTypeNumbers();
  defineLeave();
  report("exceptions",
         {{"throwing", Throwing.size()}, {"invokes", Invokes}, {"landing-pads", Pads}, {"escapes", Escapes}});
}

} // namespace

PreservedAnalyses ExceptionsPass::run(Module &M, ModuleAnalysisManager &) {
  Exceptions(M, Wanted).run();
  return PreservedAnalyses::none();
}

} // namespace godwit
