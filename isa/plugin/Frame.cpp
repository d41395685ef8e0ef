// The layout of values in memory; see Frame.h.
#include "Frame.h"
#include "llvm/IR/Constants.h"
#include "llvm/IR/Instructions.h"

using namespace llvm;

namespace godwit {

// How a vector of single bits lies in memory is the code generator's choice; one byte for each is the same anywhere.
static Type *memoryType(Type *T) {
  auto *Vector = dyn_cast<FixedVectorType>(T);
  if (!Vector || Vector->getScalarSizeInBits() % 8 == 0)
    return T;
  return FixedVectorType::get(IntegerType::get(T->getContext(), alignTo(Vector->getScalarSizeInBits(), 8)),
                              Vector->getNumElements());
}

uint64_t Frame::bytes(Type *T, const DataLayout &DL) { return DL.getTypeStoreSize(memoryType(T)).getFixedValue(); }

void Frame::store(IRBuilderBase &B, Value *V, Value *Base, uint64_t Offset) {
  Type *T = memoryType(V->getType());
  Value *Stored = T == V->getType() ? V : B.CreateZExt(V, T);
  // The buffer is aligned to 8; more cannot be said.
  B.CreateAlignedStore(Stored, B.CreateConstInBoundsGEP1_64(B.getInt8Ty(), Base, Offset),
                       commonAlignment(Align(8), Offset));
}

Value *Frame::load(IRBuilderBase &B, Type *T, Value *Base, uint64_t Offset, const Twine &Name) {
  Type *InMemory = memoryType(T);
  Value *L = B.CreateAlignedLoad(InMemory, B.CreateConstInBoundsGEP1_64(B.getInt8Ty(), Base, Offset),
                                 commonAlignment(Align(8), Offset), Name);
  return T == InMemory ? L : B.CreateTrunc(L, T);
}

Frame::Frame(std::vector<Value *> Live, const DataLayout &DL) : Values(std::move(Live)) {
  // Larger first, so that no byte is lost to alignment.
  stable_sort(Values, [&](Value *A, Value *B) {
    return DL.getTypeStoreSize(A->getType()).getFixedValue() > DL.getTypeStoreSize(B->getType()).getFixedValue();
  });
  for (Value *V : Values) {
    uint64_t Bytes = bytes(V->getType(), DL);
    Size = alignTo(Size, Bytes >= 8 ? 8 : PowerOf2Ceil(Bytes));
    Offsets.push_back(Size);
    Size += Bytes;
  }
  Size = alignTo(Size, 8);
  // The highest first, as below.
  std::reverse(Values.begin(), Values.end());
  std::reverse(Offsets.begin(), Offsets.end());
}

Frame::Frame(std::vector<Value *> Live, function_ref<uint64_t(Value *)> Offset, const DataLayout &DL)
    : Values(std::move(Live)) {
  // The highest first: what most sites save is stored last, and the blocks of many sites end alike (Saves.cpp).
  stable_sort(Values, [&](Value *A, Value *B) { return Offset(A) > Offset(B); });
  for (Value *V : Values) {
    Offsets.push_back(Offset(V));
    Size = std::max(Size, Offsets.back() + bytes(V->getType(), DL));
  }
  Size = alignTo(Size, 8);
}

void Frame::store(IRBuilderBase &B, Value *Base) const {
  for (auto [V, Offset] : zip(Values, Offsets))
    store(B, V, Base, Offset);
}

std::vector<Value *> Frame::load(IRBuilderBase &B, Value *Base) const {
  std::vector<Value *> Loaded;
  for (auto [V, Offset] : zip(Values, Offsets))
    Loaded.push_back(load(B, V->getType(), Base, Offset, V->getName()));
  return Loaded;
}

void addDefinitions(Value *Original, BasicBlock *OriginalBlock, ArrayRef<std::pair<BasicBlock *, Value *>> More) {
  SSAUpdater Updater;
  Updater.Initialize(Original->getType(), Original->getName());
  if (OriginalBlock)
    Updater.AddAvailableValue(OriginalBlock, Original);
  for (auto [BB, V] : More)
    Updater.AddAvailableValue(BB, V);
  SmallVector<Use *> Uses;
  for (Use &U : Original->uses())
    Uses.push_back(&U);
  for (Use *U : Uses) {
    auto *User = cast<Instruction>(U->getUser());
    // Behind the definition in its own block nothing else can reach.
    if (!isa<PHINode>(User) && User->getParent() == OriginalBlock)
      continue;
    Updater.RewriteUse(*U);
  }
}

} // namespace godwit
