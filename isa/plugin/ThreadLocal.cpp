// Thread-local variables: thread pointer plus a fixed offset, in one block with the same layout on every set. The
// block's first contents are a constant that the runtime copies for each thread.
#include "Passes.h"
#include "Program.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/IR/ReplaceConstant.h"

using namespace llvm;

namespace godwit {

// The block must fit into a thread slot's last quarter beside the control block (isa/ABI.md, section 3).
static constexpr uint64_t MostTls = (16U << 20) - (64U << 10) - OffTls;

static void define(Module &M, StringRef Name, Constant *Value) {
  auto *New = new GlobalVariable(M, Value->getType(), true, GlobalValue::ExternalLinkage, Value);
  if (GlobalVariable *Old = M.getGlobalVariable(Name, true)) {
    Old->replaceAllUsesWith(New);
    New->takeName(Old);
    Old->eraseFromParent();
  } else {
    New->setName(Name);
  }
  New->setAlignment(Align(16));
}

PreservedAnalyses ThreadLocalPass::run(Module &M, ModuleAnalysisManager &) {
  LLVMContext &C = M.getContext();
  const DataLayout &DL = M.getDataLayout();
  Refusals Refused("gw-thread-local");

  // Initialised variables first, so that the image ends where the zeros begin.
  SmallVector<GlobalVariable *> Variables;
  for (GlobalVariable &G : M.globals())
    if (G.isThreadLocal()) {
      if (G.isDeclaration())
        Refused.add(G, "a thread-local variable that is not part of the program");
      Variables.push_back(&G);
    }
  Refused.exitIfAny();
  auto IsZero = [](const GlobalVariable *G) { return G->getInitializer()->isNullValue(); };
  stable_sort(Variables, [&](GlobalVariable *A, GlobalVariable *B) { return !IsZero(A) && IsZero(B); });

  uint64_t Offset = 0;
  SmallVector<Constant *> Image;
  auto Pad = [&](uint64_t To) {
    if (To > Offset)
      Image.push_back(ConstantAggregateZero::get(ArrayType::get(Type::getInt8Ty(C), To - Offset)));
  };
  uint64_t ImageSize = 0;
  for (GlobalVariable *G : Variables) {
    Align Alignment = std::max(G->getAlign().valueOrOne(), DL.getPreferredAlign(G));
    if (Alignment.value() > OffTls)
      Refused.add(*G, "a thread-local variable may be aligned to 2048 at most");
    uint64_t At = alignTo(Offset, Alignment);
    if (!IsZero(G)) {
      Pad(At);
      Image.push_back(G->getInitializer());
    }
    Offset = At + DL.getTypeAllocSize(G->getValueType()).getFixedValue();
    if (!IsZero(G))
      ImageSize = Offset;

    convertUsersOfConstantsToInstructions({G});
    for (User *U : make_early_inc_range(G->users())) {
      auto *Inst = cast<Instruction>(U);
      auto *Address = dyn_cast<IntrinsicInst>(Inst);
      if (Address && Address->getIntrinsicID() == Intrinsic::threadlocal_address) {
        IRBuilder<> B(Inst);
        Inst->replaceAllUsesWith(threadField(B, OffTls + At));
        Inst->eraseFromParent();
        continue;
      }
      for (Use &Operand : Inst->operands())
        if (Operand.get() == G) {
          auto *Phi = dyn_cast<PHINode>(Inst);
          IRBuilder<> B(Phi ? Phi->getIncomingBlock(Operand)->getTerminator() : Inst);
          Operand.set(threadField(B, OffTls + At));
        }
    }
  }
  if (Offset > MostTls)
    Refused.add(*Variables.back(), "the thread-local variables need " + Twine(Offset) + " bytes; " + Twine(MostTls) +
                                       " is the most a thread's slot holds");
  Refused.exitIfAny();

  for (GlobalVariable *G : Variables) {
    G->replaceAllUsesWith(PoisonValue::get(G->getType()));
    G->eraseFromParent();
  }
  Image.push_back(ConstantInt::get(Type::getInt8Ty(C), 0)); // an empty image needs an address, too
  define(M, name::TlsImage, ConstantStruct::getAnon(Image, /*Packed=*/true));
  define(M, name::TlsImageSize, ConstantInt::get(Type::getInt64Ty(C), ImageSize));
  define(M, name::TlsSize, ConstantInt::get(Type::getInt64Ty(C), Offset));
  report("thread-local", {{"variables", Variables.size()}, {"bytes", Offset}});
  return PreservedAnalyses::none();
}

} // namespace godwit
