// Backward dataflow over bit vectors: live-in = uses before definitions + (live-out - definitions).
#include "Liveness.h"
#include "llvm/ADT/PostOrderIterator.h"
#include "llvm/IR/CFG.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"

using namespace llvm;

namespace godwit {

static std::vector<Value *> valuesOf(Function &F) {
  std::vector<Value *> All;
  for (Argument &A : F.args())
    All.push_back(&A);
  for (Instruction &I : instructions(F))
    if (!I.getType()->isVoidTy())
      All.push_back(&I);
  return All;
}

Liveness::Liveness(Function &F) : Liveness(F, valuesOf(F), SmallPtrSet<const Value *, 1>()) {}

Liveness::Liveness(Function &F, ArrayRef<Value *> Of, const SmallPtrSetImpl<const Value *> &DerivedOnes)
    : Values(Of), Derived(DerivedOnes.begin(), DerivedOnes.end()) {
  for (unsigned I = 0; I < Values.size(); ++I)
    Number[Values[I]] = I;
  solve(F);
}

void Liveness::solve(Function &F) {
  struct Block {
    BitVector Uses, Definitions;
  };
  DenseMap<const BasicBlock *, Block> Blocks;
  for (BasicBlock &BB : F) {
    Block &B = Blocks[&BB];
    for (BitVector *Set : {&B.Uses, &B.Definitions, &In[&BB], &Out[&BB]})
      Set->resize(Values.size());
  }
  for (BasicBlock &BB : F) {
    Block &B = Blocks[&BB];
    for (Instruction &I : reverse(BB)) {
      if (std::optional<unsigned> Defined = number(&I)) {
        B.Definitions.set(*Defined);
        B.Uses.reset(*Defined);
      }
      if (auto *Phi = dyn_cast<PHINode>(&I)) {
        for (unsigned K = 0; K < Phi->getNumIncomingValues(); ++K)
          use(Out[Phi->getIncomingBlock(K)], Phi->getIncomingValue(K));
        continue;
      }
      for (const Value *Operand : I.operands())
        use(B.Uses, Operand);
    }
  }

  std::vector<BasicBlock *> Order(po_begin(&F), po_end(&F));
  for (bool Changed = true; Changed;) {
    Changed = false;
    for (BasicBlock *BB : Order) {
      const Block &B = Blocks[BB];
      BitVector &LiveOut = Out[BB];
      for (BasicBlock *Next : successors(BB))
        LiveOut |= In[Next];
      BitVector Live = LiveOut;
      Live.reset(B.Definitions);
      Live |= B.Uses;
      BitVector &Old = In[BB];
      if (Live != Old) {
        Old = std::move(Live);
        Changed = true;
      }
    }
  }
}

std::vector<Value *> Liveness::liveIn(const BasicBlock *BB) const {
  std::vector<Value *> Live;
  for (unsigned I : In.find(BB)->second.set_bits())
    Live.push_back(Values[I]);
  return Live;
}

std::optional<unsigned> Liveness::number(const Value *V) const {
  auto It = Number.find(V);
  return It == Number.end() ? std::nullopt : std::optional<unsigned>(It->second);
}

void Liveness::use(BitVector &Live, const Value *V) const {
  if (std::optional<unsigned> Used = number(V)) {
    Live.set(*Used);
    return;
  }
  if (Derived.contains(V))
    for (const Value *Operand : cast<Instruction>(V)->operands())
      use(Live, Operand);
}

} // namespace godwit
