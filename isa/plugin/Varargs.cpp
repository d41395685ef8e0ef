// Variable arguments in memory: `f(a, ...)` becomes `f(a, pointer to the arguments)`, for definitions and calls alike.
//
// The front end has already expanded va_arg for AAPCS64: its va_list holds a pointer to arguments on the stack, and
// two offsets that say how many register arguments are left. Saying "none are left" makes every va_arg read the
// stack, which now is the caller's buffer, laid out as AAPCS64 lays out stack arguments.
#include "Passes.h"
#include "Program.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/IntrinsicInst.h"

using namespace llvm;

namespace godwit {
namespace {

// struct va_list of AAPCS64: __stack, __gr_top, __vr_top, __gr_offs, __vr_offs.
constexpr uint64_t VaListSize = 32, GrTop = 8, VrTop = 16, GrOffs = 24, VrOffs = 28;

FunctionType *fixedType(FunctionType *Type) {
  SmallVector<llvm::Type *> Params(Type->params());
  Params.push_back(PointerType::get(Type->getContext(), 0));
  return FunctionType::get(Type->getReturnType(), Params, false);
}

void lowerStart(IntrinsicInst *Start, Argument *Buffer) {
  IRBuilder<> B(Start);
  Value *List = Start->getArgOperand(0);
  auto Field = [&](uint64_t Offset) { return B.CreateConstInBoundsGEP1_64(B.getInt8Ty(), List, Offset); };
  Value *Null = ConstantPointerNull::get(B.getPtrTy());
  B.CreateStore(Buffer, List);
  B.CreateStore(Null, Field(GrTop));
  B.CreateStore(Null, Field(VrTop));
  B.CreateStore(B.getInt32(0), Field(GrOffs));
  B.CreateStore(B.getInt32(0), Field(VrOffs));
  Start->eraseFromParent();
}

void lowerDefinition(Function *F) {
  Module &M = *F->getParent();
  auto *Fixed = Function::Create(fixedType(F->getFunctionType()), F->getLinkage(), F->getAddressSpace(), "", &M);
  Fixed->copyAttributesFrom(F);
  Fixed->setSubprogram(F->getSubprogram());
  F->setSubprogram(nullptr);
  Fixed->takeName(F);
  Fixed->splice(Fixed->begin(), F);
  for (auto [Old, New] : zip(F->args(), Fixed->args())) {
    Old.replaceAllUsesWith(&New);
    New.takeName(&Old);
  }
  Argument *Buffer = Fixed->getArg(Fixed->arg_size() - 1);
  Buffer->setName("gw.varargs");
  for (Instruction &I : make_early_inc_range(instructions(Fixed)))
    if (auto *II = dyn_cast<IntrinsicInst>(&I); II && II->getIntrinsicID() == Intrinsic::vastart)
      lowerStart(II, Buffer);
  F->replaceAllUsesWith(Fixed);
  F->eraseFromParent();
}

void lowerListIntrinsic(IntrinsicInst *II) {
  if (II->getIntrinsicID() == Intrinsic::vacopy) {
    IRBuilder<> B(II);
    B.CreateMemCpy(II->getArgOperand(0), Align(8), II->getArgOperand(1), Align(8), VaListSize);
  }
  II->eraseFromParent();
}

void lowerCall(CallBase *Call) {
  Function &F = *Call->getFunction();
  const DataLayout &DL = F.getParent()->getDataLayout();
  unsigned Named = Call->getFunctionType()->getNumParams();

  auto ByVal = [&](unsigned I) { return Call->isByValArgument(I) ? Call->getParamByValType(I) : nullptr; };
  uint64_t Size = 0;
  SmallVector<uint64_t> Offsets;
  for (unsigned I = Named; I < Call->arg_size(); ++I) {
    Type *Ty = ByVal(I) ? ByVal(I) : Call->getArgOperand(I)->getType();
    Align Alignment = ByVal(I) ? Call->getParamAlign(I).valueOrOne() : DL.getABITypeAlign(Ty);
    Size = alignTo(Size, std::clamp(Alignment, Align(8), Align(16)));
    Offsets.push_back(Size);
    Size += alignTo(DL.getTypeAllocSize(Ty).getFixedValue(), 8);
  }

  IRBuilder<> Entry(&*F.getEntryBlock().begin());
  auto *Buffer =
      Entry.CreateAlloca(ArrayType::get(Entry.getInt8Ty(), std::max<uint64_t>(Size, 8)), nullptr, "gw.arguments");
  Buffer->setAlignment(Align(16));

  IRBuilder<> B(Call);
  SmallVector<Value *> Args(Call->arg_begin(), Call->arg_begin() + Named);
  AttributeList Attributes = Call->getAttributes();
  for (unsigned I = Named; I < Call->arg_size(); ++I) {
    Value *Slot = B.CreateConstInBoundsGEP1_64(B.getInt8Ty(), Buffer, Offsets[I - Named]);
    Value *Arg = Call->getArgOperand(I);
    if (Type *Ty = ByVal(I))
      B.CreateMemCpy(Slot, Align(8), Arg, Call->getParamAlign(I), DL.getTypeAllocSize(Ty).getFixedValue());
    else
      B.CreateAlignedStore(Arg, Slot, Align(8));
    Attributes = Attributes.removeParamAttributes(F.getContext(), I);
  }
  Args.push_back(Buffer);
  FunctionType *Fixed = fixedType(Call->getFunctionType());
  CallBase *New = nullptr;
  if (auto *Invoke = dyn_cast<InvokeInst>(Call))
    New = B.CreateInvoke(Fixed, Call->getCalledOperand(), Invoke->getNormalDest(), Invoke->getUnwindDest(), Args);
  else
    New = B.CreateCall(Fixed, Call->getCalledOperand(), Args);
  New->setAttributes(Attributes);
  New->setCallingConv(Call->getCallingConv());
  New->setDebugLoc(Call->getDebugLoc());
  Call->replaceAllUsesWith(New);
  New->takeName(Call);
  Call->eraseFromParent();
}

} // namespace

PreservedAnalyses VarargsPass::run(Module &M, ModuleAnalysisManager &) {
  Refusals Refused("gw-varargs");
  uint64_t Definitions = 0;
  uint64_t Calls = 0;
  for (Function &F : make_early_inc_range(M)) {
    if (!F.isVarArg() || F.isIntrinsic())
      continue;
    if (F.isDeclaration()) {
      if (!F.use_empty())
        Refused.add(F, "a function with variable arguments that is not part of the program cannot be called");
      continue;
    }
    lowerDefinition(&F);
    ++Definitions;
  }
  Refused.exitIfAny();

  for (Function &F : M)
    for (Instruction &I : make_early_inc_range(instructions(F))) {
      if (auto *II = dyn_cast<IntrinsicInst>(&I)) {
        if (II->getIntrinsicID() == Intrinsic::vaend || II->getIntrinsicID() == Intrinsic::vacopy)
          lowerListIntrinsic(II);
      } else if (auto *Call = dyn_cast<CallBase>(&I);
                 Call && isRealCall(*Call) && Call->getFunctionType()->isVarArg()) {
        lowerCall(Call);
        ++Calls;
      } else if (isa<VAArgInst>(I)) {
        Refused.add(I, "the va_arg instruction is not expanded by the front end");
      }
    }
  Refused.exitIfAny();
  report("varargs", {{"definitions", Definitions}, {"calls", Calls}});
  return PreservedAnalyses::none();
}

} // namespace godwit
