// Static constructors and destructors become two ordinary functions, so that they too can be suspended.
#include "Passes.h"
#include "Program.h"
#include "llvm/Transforms/Utils/ModuleUtils.h"

using namespace llvm;

namespace godwit {
namespace {

struct Entry {
  uint64_t Priority;
  Function *Callee;
};

std::vector<Entry> take(Module &M, StringRef ListName) {
  std::vector<Entry> Entries;
  GlobalVariable *List = M.getGlobalVariable(ListName);
  if (!List)
    return Entries;
  if (auto *Array = dyn_cast<ConstantArray>(List->getInitializer()))
    for (const Use &U : Array->operands()) {
      auto *Fields = cast<ConstantStruct>(U);
      if (auto *F = dyn_cast<Function>(Fields->getOperand(1)->stripPointerCasts()))
        Entries.push_back({cast<ConstantInt>(Fields->getOperand(0))->getZExtValue(), F});
    }
  List->eraseFromParent();
  stable_sort(Entries, [](const Entry &A, const Entry &B) { return A.Priority < B.Priority; });
  return Entries;
}

void define(Module &M, StringRef Name, ArrayRef<Entry> Entries) {
  LLVMContext &C = M.getContext();
  FunctionCallee Declared = M.getOrInsertFunction(Name, Type::getVoidTy(C));
  auto *F = cast<Function>(Declared.getCallee());
  F->setLinkage(GlobalValue::InternalLinkage);
  IRBuilder<> B(BasicBlock::Create(C, "", F));
  for (const Entry &E : Entries)
    B.CreateCall(E.Callee->getFunctionType(), E.Callee);
  B.CreateRetVoid();
}

} // namespace

PreservedAnalyses ConstructorsPass::run(Module &M, ModuleAnalysisManager &) {
  std::vector<Entry> Constructors = take(M, "llvm.global_ctors");
  std::vector<Entry> Destructors = take(M, "llvm.global_dtors");
  std::reverse(Destructors.begin(), Destructors.end());
  define(M, name::RunConstructors, Constructors);
  define(M, name::RunDestructors, Destructors);
  for (StringRef List : {"llvm.used", "llvm.compiler.used"})
    if (GlobalVariable *Used = M.getGlobalVariable(List))
      Used->eraseFromParent();
  report("constructors", {{"constructors", Constructors.size()}, {"destructors", Destructors.size()}});
  return PreservedAnalyses::none();
}

} // namespace godwit
