// Which SSA values a block needs: on entry, and when it ends.
#pragma once

#include "llvm/ADT/BitVector.h"
#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/SmallPtrSet.h"
#include "llvm/IR/Function.h"
#include <vector>

namespace godwit {

class Liveness {
public:
  // Of all arguments and instructions, in the order of the function.
  explicit Liveness(llvm::Function &F);
  // Of some values only, in their order. A use of what is derived is one of its operands.
  Liveness(llvm::Function &F, llvm::ArrayRef<llvm::Value *> Of,
           const llvm::SmallPtrSetImpl<const llvm::Value *> &DerivedOnes);

  // Values that are live on entry of a block. The block's own phis are not among them; what their edges need is live
  // at the end of the predecessors.
  std::vector<llvm::Value *> liveIn(const llvm::BasicBlock *BB) const;
  // Those that are live at the end of a block, by number.
  const llvm::BitVector &liveOut(const llvm::BasicBlock *BB) const { return Out.find(BB)->second; }
  // A value's index, if it is one of those that are looked at.
  std::optional<unsigned> number(const llvm::Value *V) const;
  // Sets what a use of V keeps alive.
  void use(llvm::BitVector &Live, const llvm::Value *V) const;

private:
  void solve(llvm::Function &F);

  std::vector<llvm::Value *> Values;
  llvm::DenseMap<const llvm::Value *, unsigned> Number;
  llvm::SmallPtrSet<const llvm::Value *, 32> Derived;
  llvm::DenseMap<const llvm::BasicBlock *, llvm::BitVector> In;
  llvm::DenseMap<const llvm::BasicBlock *, llvm::BitVector> Out;
};

} // namespace godwit
