// What both kinds of resume clones begin with: a copy of the function without arguments, apart and optimised for size.
#pragma once

#include "Sites.h"
#include "llvm/ADT/SetVector.h"
#include "llvm/Transforms/Utils/Cloning.h"

namespace godwit {

class CloneBody {
protected:
  CloneBody(llvm::Function &F, llvm::ArrayRef<Site> Sites) : F(F), M(*F.getParent()), C(F.getContext()), Sites(Sites) {}
  // Entry is empty then, and nothing leads to the body yet.
  void cloneBody();
  void findAlwaysDerived();
  void deriveAtUses(llvm::Instruction *Derived);
  // Has the function dropped an anchor (SetJump.cpp) before this site?
  bool isAnchored(const Site &S) const;
  // Drops one for the clone at the end of a block without terminator, and goes on behind that. `Again` yields the
  // clone's value for one of the function's.
  void dropAnchor(llvm::IRBuilderBase &B, llvm::function_ref<llvm::Value *(llvm::Value *)> Again);
  llvm::BasicBlock *cloned(llvm::BasicBlock *BB) const { return llvm::cast<llvm::BasicBlock>(Map.lookup(BB)); }

private:
  void keepLines();

protected:
  llvm::Function &F;
  llvm::Module &M;
  llvm::LLVMContext &C;
  llvm::ArrayRef<Site> Sites;
  llvm::Function *Clone = nullptr;
  llvm::ValueToValueMapTy Map;
  llvm::BasicBlock *Entry = nullptr;
  // Where a site's number that the function does not have would lead.
  llvm::BasicBlock *Never = nullptr;
  // Values that every site derives and none saves, operands before users.
  llvm::SetVector<llvm::Instruction *> AlwaysDerived;
};

} // namespace godwit
