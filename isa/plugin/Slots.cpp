// Two values share a slot when they are never needed at the same time: a graph of what is live where something is
// defined, and a colouring of it, the values of the most sites first. So these lie at the lowest offsets, and a frame
// ends behind the last value that its site saves.
//
// What all sites derive (Sites.h) has no slot; where it is used, its operands have to be there.
#include "Slots.h"
#include "Liveness.h"
#include "llvm/ADT/BitVector.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/Module.h"

using namespace llvm;

namespace godwit {
namespace {

class Interference {
public:
  Interference(Function &F, ArrayRef<Value *> Values, const SmallPtrSetImpl<const Value *> &Derived);
  const BitVector &of(unsigned Value) const { return With[Value]; }

private:
  void meet(unsigned Defined, const BitVector &Live);
  void scan(BasicBlock &BB);

  Liveness Known;
  std::vector<BitVector> With;
};

void Interference::meet(unsigned Defined, const BitVector &Live) {
  With[Defined] |= Live;
  for (unsigned Other : Live.set_bits())
    With[Other].set(Defined);
}

void Interference::scan(BasicBlock &BB) {
  BitVector Live = Known.liveOut(&BB);
  for (Instruction &I : reverse(BB)) {
    if (isa<PHINode>(I))
      break;
    if (std::optional<unsigned> Defined = Known.number(&I)) {
      meet(*Defined, Live);
      Live.reset(*Defined);
    }
    for (const Value *Operand : I.operands())
      Known.use(Live, Operand);
  }
  // The clone stores all phis at the block's beginning, one after the other.
  for (PHINode &Phi : BB.phis())
    if (std::optional<unsigned> Defined = Known.number(&Phi))
      Live.set(*Defined);
  for (PHINode &Phi : BB.phis())
    if (std::optional<unsigned> Defined = Known.number(&Phi))
      meet(*Defined, Live);
}

Interference::Interference(Function &F, ArrayRef<Value *> Values, const SmallPtrSetImpl<const Value *> &Derived)
    : Known(F, Values, Derived), With(Values.size(), BitVector(Values.size())) {
  for (BasicBlock &BB : F)
    scan(BB);
  BitVector Arguments(Values.size());
  for (Argument &A : F.args())
    if (std::optional<unsigned> Defined = Known.number(&A))
      Arguments.set(*Defined);
  for (unsigned A : Arguments.set_bits())
    meet(A, Arguments);
}

// Values of up to 8 bytes have slots of 4 or 8, so that few sizes share many.
uint64_t slotSize(const Value &V, const DataLayout &DL) {
  uint64_t Bytes = Frame::bytes(V.getType(), DL);
  return Bytes <= 4 ? 4 : alignTo(Bytes, Bytes <= 8 ? 8 : 16);
}

} // namespace

Slots::Slots(Function &F, ArrayRef<Site> Sites) {
  const DataLayout &DL = F.getParent()->getDataLayout();
  MapVector<Value *, unsigned> Weights;
  for (const Site &S : Sites)
    for (Value *V : S.Saved.values())
      ++Weights[V];
  SmallPtrSet<const Value *, 32> Derived;
  for (const Site &S : Sites)
    for (Instruction *I : S.Derived)
      if (!Weights.contains(I))
        Derived.insert(I);

  auto Sorted = Weights.takeVector();
  stable_sort(Sorted, [](const auto &A, const auto &B) { return A.second > B.second; });
  std::vector<Value *> Values;
  for (const auto &[V, Weight] : Sorted)
    Values.push_back(V);

  Interference Graph(F, Values, Derived);
  struct Slot {
    uint64_t Bytes;
    uint64_t Offset;
    BitVector Users;
  };
  std::vector<Slot> All;
  for (unsigned I = 0; I < Values.size(); ++I) {
    uint64_t Bytes = slotSize(*Values[I], DL);
    auto Free = find_if(All, [&](const Slot &S) { return S.Bytes == Bytes && !S.Users.anyCommon(Graph.of(I)); });
    if (Free == All.end()) {
      Size = alignTo(Size, std::min<uint64_t>(Bytes, 16));
      All.push_back({Bytes, Size, BitVector(Values.size())});
      Size += Bytes;
      Free = std::prev(All.end());
    }
    Free->Users.set(I);
    Offsets[Values[I]] = Free->Offset;
  }
  Size = alignTo(Size, 16);
}

} // namespace godwit
