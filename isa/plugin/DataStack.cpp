// Locals that still have an address after optimisation move to the data stack, which lies at the same addresses on
// every set and is copied as it is. So do variable-length arrays and the copies that byval arguments ask for.
//
// The data stack pointer is a field of the control block. A function with such locals lowers it once, and puts the old
// value back where it returns. The address of a local is computed where it is used, as it would be on a native stack:
// the one value that lives through the function is the frame's address.
#include "Passes.h"
#include "Program.h"
#include "llvm/IR/AttributeMask.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/Transforms/Utils/Local.h"

using namespace llvm;

namespace godwit {
namespace {

class Lowering {
public:
  explicit Lowering(Function &F) : F(F), DL(F.getParent()->getDataLayout()) {}
  // Bytes of the fixed part; zero when the function has nothing on the data stack.
  uint64_t run();

private:
  void collect();
  void place(Value *Local, uint64_t Bytes, Align Alignment);
  void addressAtUses(Value *Address, Value *Base, uint64_t Offset, IRBuilder<> &Entry);
  void replace(Value *Local, Value *Base, uint64_t Offset, IRBuilder<> &Entry);
  void lowerDynamic(AllocaInst *Alloca);
  void lowerSaveRestore(IntrinsicInst *II);

  Function &F;
  const DataLayout &DL;
  SmallVector<AllocaInst *> Dynamic;
  SmallVector<IntrinsicInst *> SaveRestore;
  // A local and the distance of its end from the frame's top.
  SmallVector<std::pair<Value *, uint64_t>> Locals;
  uint64_t Size = 0;
  Align FrameAlign = Align(16);
};

void Lowering::place(Value *Local, uint64_t Bytes, Align Alignment) {
  FrameAlign = std::max(FrameAlign, Alignment);
  Size = alignTo(Size, Alignment);
  Locals.push_back({Local, Size});
  Size += Bytes;
}

void Lowering::collect() {
  for (Argument &A : F.args())
    if (A.hasByValAttr())
      place(&A, DL.getTypeAllocSize(A.getParamByValType()).getFixedValue(), A.getParamAlign().valueOrOne());
  for (Instruction &I : make_early_inc_range(instructions(F))) {
    if (auto *Alloca = dyn_cast<AllocaInst>(&I)) {
      if (std::optional<TypeSize> Bytes = Alloca->getAllocationSize(DL); Bytes && Alloca->isStaticAlloca())
        place(Alloca, Bytes->getFixedValue(), Alloca->getAlign());
      else
        Dynamic.push_back(Alloca);
    } else if (auto *II = dyn_cast<IntrinsicInst>(&I)) {
      if (II->isLifetimeStartOrEnd())
        II->eraseFromParent();
      else if (II->getIntrinsicID() == Intrinsic::stacksave || II->getIntrinsicID() == Intrinsic::stackrestore)
        SaveRestore.push_back(II);
    }
  }
}

// Puts base + Offset in the place of an address and of what is at constant distances from it, at each use. What only
// debug information refers to is left at the beginning, where it becomes an offset too.
void Lowering::addressAtUses(Value *Address, Value *Base, uint64_t Offset, IRBuilder<> &Entry) {
  auto AddressAt = [&](IRBuilder<> &B) {
    return B.CreateInBoundsGEP(B.getInt8Ty(), Base, B.getInt64(Offset), Address->getName());
  };
  DenseMap<BasicBlock *, Value *> AtEnd;
  SmallVector<GetElementPtrInst *> Parts;
  for (Use &U : make_early_inc_range(Address->uses())) {
    auto *User = cast<Instruction>(U.getUser());
    if (auto *GEP = dyn_cast<GetElementPtrInst>(User); GEP && GEP->hasAllConstantIndices()) {
      Parts.push_back(GEP);
    } else if (auto *Phi = dyn_cast<PHINode>(User)) {
      Value *&There = AtEnd[Phi->getIncomingBlock(U)];
      if (!There) {
        IRBuilder<> B(Phi->getIncomingBlock(U)->getTerminator());
        There = AddressAt(B);
      }
      U.set(There);
    } else {
      IRBuilder<> B(User);
      U.set(AddressAt(B));
    }
  }
  for (GetElementPtrInst *GEP : Parts) {
    APInt Distance(DL.getIndexTypeSizeInBits(GEP->getType()), 0);
    GEP->accumulateConstantOffset(DL, Distance);
    addressAtUses(GEP, Base, Offset + Distance.getSExtValue(), Entry);
    GEP->eraseFromParent();
  }
  if (Address->isUsedByMetadata()) {
    auto *Described = cast<Instruction>(AddressAt(Entry));
    Address->replaceAllUsesWith(Described);
    salvageDebugInfo(*Described);
    Described->eraseFromParent();
  }
}

void Lowering::replace(Value *Local, Value *Base, uint64_t Offset, IRBuilder<> &Entry) {
  addressAtUses(Local, Base, Offset, Entry);
  if (auto *Alloca = dyn_cast<AllocaInst>(Local)) {
    Alloca->eraseFromParent();
    return;
  }
  auto *A = cast<Argument>(Local);
  Align Alignment = A->getParamAlign().valueOrOne();
  Value *Copy = Entry.CreateInBoundsGEP(Entry.getInt8Ty(), Base, Entry.getInt64(Offset), A->getName());
  Entry.CreateMemCpy(Copy, Alignment, A, Alignment, DL.getTypeAllocSize(A->getParamByValType()).getFixedValue());
}

void Lowering::lowerDynamic(AllocaInst *Alloca) {
  IRBuilder<> B(Alloca);
  Type *I64 = B.getInt64Ty();
  Value *Bytes = B.CreateMul(B.CreateZExtOrTrunc(Alloca->getArraySize(), I64),
                             B.getInt64(DL.getTypeAllocSize(Alloca->getAllocatedType()).getFixedValue()));
  Value *Field = threadField(B, OffDataStack);
  Value *Low = B.CreateGEP(B.getInt8Ty(), B.CreateLoad(B.getPtrTy(), Field), B.CreateNeg(Bytes));
  Align Alignment = std::max(Align(16), Alloca->getAlign());
  Value *Address = B.CreateIntrinsic(Intrinsic::ptrmask, {B.getPtrTy(), I64},
                                     {Low, B.getInt64(-static_cast<int64_t>(Alignment.value()))});
  B.CreateStore(Address, Field);
  Address->takeName(Alloca);
  Alloca->replaceAllUsesWith(Address);
  Alloca->eraseFromParent();
}

void Lowering::lowerSaveRestore(IntrinsicInst *II) {
  IRBuilder<> B(II);
  Value *Field = threadField(B, OffDataStack);
  if (II->getIntrinsicID() == Intrinsic::stacksave)
    II->replaceAllUsesWith(B.CreateLoad(B.getPtrTy(), Field));
  else
    B.CreateStore(II->getArgOperand(0), Field);
  II->eraseFromParent();
}

uint64_t Lowering::run() {
  collect();
  if (Locals.empty() && Dynamic.empty() && SaveRestore.empty())
    return 0;

  Size = alignTo(Size, FrameAlign);
  // The locals are erased one by one, so the place must be marked by something that stays.
  BasicBlock &Entry = F.getEntryBlock();
  auto *Place = new FreezeInst(PoisonValue::get(Type::getInt64Ty(F.getContext())), "", Entry.getFirstInsertionPt());
  IRBuilder<> B(Place);
  Value *Field = threadField(B, OffDataStack);
  Value *Old = B.CreateLoad(B.getPtrTy(), Field, "gw.stack.old");
  Value *Base = B.CreateInBoundsGEP(B.getInt8Ty(), Old, B.getInt64(-static_cast<int64_t>(Size)), "gw.stack");
  if (FrameAlign > Align(16))
    Base = B.CreateIntrinsic(Intrinsic::ptrmask, {B.getPtrTy(), B.getInt64Ty()},
                             {Base, B.getInt64(-static_cast<int64_t>(FrameAlign.value()))}, nullptr, "gw.stack");
  B.CreateStore(Base, Field);
  for (auto [Local, Offset] : Locals)
    replace(Local, Base, Offset, B);
  Place->eraseFromParent();

  for (AllocaInst *Alloca : Dynamic)
    lowerDynamic(Alloca);
  for (IntrinsicInst *II : SaveRestore)
    lowerSaveRestore(II);
  for (BasicBlock &BB : F)
    if (auto *Return = dyn_cast<ReturnInst>(BB.getTerminator())) {
      B.SetInsertPoint(Return);
      bool Aligned = FrameAlign > Align(16);
      Value *Top = Aligned ? Old : B.CreateInBoundsGEP(B.getInt8Ty(), Base, B.getInt64(Size));
      B.CreateStore(Top, threadField(B, OffDataStack));
    }
  // What the caller's frame holds is no longer a native local, so "tail" promises nothing any more.
  for (Instruction &I : instructions(F))
    if (auto *Call = dyn_cast<CallInst>(&I))
      Call->setTailCallKind(CallInst::TCK_None);
  return std::max<uint64_t>(Size, 1);
}

// By value means: the callee copies, from memory of its caller that no set treats in its own way. The hidden result
// pointer is an ordinary argument.
void dropAbiAttributes(Module &M) {
  AttributeMask Mask;
  Mask.addAttribute(Attribute::ByVal);
  Mask.addAttribute(Attribute::StructRet);
  auto Drop = [&](auto &Owner, unsigned Count) {
    for (unsigned I = 0; I < Count; ++I)
      Owner.removeParamAttrs(I, Mask);
  };
  for (Function &F : M) {
    if (F.isDeclaration())
      continue;
    Drop(F, F.arg_size());
    for (Instruction &I : instructions(F))
      if (auto *Call = dyn_cast<CallBase>(&I)) {
        Function *Callee = calleeOf(*Call);
        if (!Callee || !Callee->isDeclaration())
          for (unsigned A = 0; A < Call->arg_size(); ++A)
            Call->setAttributes(Call->getAttributes().removeParamAttributes(M.getContext(), A, Mask));
      }
  }
}

} // namespace

PreservedAnalyses DataStackPass::run(Module &M, ModuleAnalysisManager &) {
  Refusals Refused("gw-data-stack");
  uint64_t Functions = 0;
  uint64_t Largest = 0;
  for (Function &F : M) {
    if (F.isDeclaration())
      continue;
    for (Argument &A : F.args())
      if (A.hasInAllocaAttr() || A.hasSwiftErrorAttr() || A.hasNestAttr())
        Refused.add(F, "an argument is passed in a way that has no neutral form");
    uint64_t Size = Lowering(F).run();
    Functions += Size != 0;
    Largest = std::max(Largest, Size);
  }
  Refused.exitIfAny();
  dropAbiAttributes(M);
  report("data-stack", {{"functions", Functions}, {"largest-frame", Largest}});
  return PreservedAnalyses::none();
}

} // namespace godwit
