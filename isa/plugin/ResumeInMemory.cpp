// The clone of a large function, which keeps the values that are live at its sites in memory: in slots on the native
// stack, to which nothing but the clone's own loads and stores refers. A frame is a copy of the first slots, so all
// sites are entered and left in one way, and no value has to be merged from many:
//
//     entry:  __gw_unpack(slots)                      cold i:  br give up
//             %next = call @__gw_next()
//             %r = call %next()                       give up: %site = phi …
//             br state != 0, give up, go on                    __gw_repack(%site, slots)
//     go on:  switch site, behind 0, behind 1, …               ret poison
//
// Its code grows with the function, not with what is live at all sites; it is slower, until the function returns.
#include "CloneBody.h"
#include "Program.h"
#include "Slots.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/IR/Instructions.h"
#include "llvm/Transforms/Utils/BasicBlockUtils.h"

using namespace llvm;

namespace godwit {
namespace {

class MemoryCloner : CloneBody {
public:
  MemoryCloner(Function &F, ArrayRef<Site> Sites, const Slots &Places) : CloneBody(F, Sites), Places(Places) {}
  Function *run();

private:
  Type *resultClass(Type *T) const;
  void makeGiveUp();
  void addDispatch();
  void addGroup(BasicBlock *Group, Type *Class, ArrayRef<const Site *> Members, Value *Id);
  void giveUpAt(const Site &S);
  void useSlots(BasicBlock &BB);

  const Slots &Places;
  Value *Memory = nullptr;
  BasicBlock *GiveUp = nullptr;
  PHINode *GivenUp = nullptr;
  // Values of the clone that have a slot.
  DenseMap<Value *, uint64_t> Offsets;
};

// Calls of the same class are made by the same call instruction: all integers and pointers come back in one register.
Type *MemoryCloner::resultClass(Type *T) const {
  Type *I64 = Type::getInt64Ty(C);
  bool InRegister = T->isVoidTy() || T->isPointerTy() || (T->isIntegerTy() && T->getIntegerBitWidth() <= 64);
  return InRegister ? I64 : T;
}

void MemoryCloner::makeGiveUp() {
  GiveUp = BasicBlock::Create(C, "gw.give.up", Clone);
  IRBuilder<> B(GiveUp);
  GivenUp = B.CreatePHI(B.getInt32Ty(), Sites.size() + 1);
  B.CreateCall(M.getOrInsertFunction(name::Repack, B.getVoidTy(), B.getInt32Ty(), B.getPtrTy()), {GivenUp, Memory});
  if (Clone->getReturnType()->isVoidTy())
    B.CreateRetVoid();
  else
    B.CreateRet(PoisonValue::get(Clone->getReturnType()));
}

void MemoryCloner::giveUpAt(const Site &S) {
  BasicBlock *Save = cloned(S.Save);
  for (BasicBlock *Next : successors(Save))
    Next->removePredecessor(Save, true);
  while (!Save->empty())
    Save->back().eraseFromParent();
  IRBuilder<>(Save).CreateBr(GiveUp);
  GivenUp->addIncoming(ConstantInt::get(Type::getInt32Ty(C), S.Id), Save);
}

// Calls the next frame's clone in place of the members' calls, and goes on behind them.
void MemoryCloner::addGroup(BasicBlock *Group, Type *Class, ArrayRef<const Site *> Members, Value *Id) {
  auto *Left = BasicBlock::Create(C, "gw.left", Clone);
  auto *GoOn = BasicBlock::Create(C, "gw.go.on", Clone);
  IRBuilder<> B(Group);
  if (isAnchored(*Members.front()))
    dropAnchor(B, [&](Value *V) { return Map.lookup(V); });
  Value *Next = B.CreateCall(M.getOrInsertFunction(name::Next, B.getPtrTy()));
  CallInst *Result = B.CreateCall(FunctionType::get(Class, false), Next);
  if (Members.size() == 1)
    Result->setDebugLoc(cast<Instruction>(Map.lookup(Members.front()->Call))->getDebugLoc());
  branchOnState(B, Left, GoOn);

  // In a function that uses setjmp, leaving is a question of the site.
  B.SetInsertPoint(Left);
  if (any_of(Members, [](const Site *S) { return S->Cold != S->Save; })) {
    SwitchInst *Leave = B.CreateSwitch(Id, Never, Members.size());
    for (const Site *S : Members)
      Leave->addCase(ConstantInt::get(B.getInt32Ty(), S->Id), cloned(S->Cold));
  } else {
    B.CreateBr(GiveUp);
    GivenUp->addIncoming(Id, Left);
  }

  B.SetInsertPoint(GoOn);
  DenseMap<Type *, Value *> Results;
  SwitchInst *Enter = B.CreateSwitch(Id, Never, Members.size());
  B.SetInsertPoint(Enter);
  for (const Site *S : Members) {
    BasicBlock *Behind = cloned(S->Behind);
    Enter->addCase(ConstantInt::get(B.getInt32Ty(), S->Id), Behind);
    if (S->Call->use_empty())
      continue;
    Type *T = S->Call->getType();
    Value *&Again = Results[T];
    if (!Again && T == Class)
      Again = Result;
    else if (!Again)
      Again = T->isPointerTy() ? B.CreateIntToPtr(Result, T) : B.CreateTrunc(Result, T);
    Value *Call = Map.lookup(S->Call);
    PHINode *Both = PHINode::Create(T, 2, "gw.result", Behind->begin());
    Call->replaceAllUsesWith(Both);
    Both->addIncoming(Call, cloned(S->Head));
    Both->addIncoming(Again, GoOn);
    Map[S->Call] = Both;
  }
}

void MemoryCloner::addDispatch() {
  IRBuilder<> B(Entry);
  auto *Alloca = B.CreateAlloca(ArrayType::get(B.getInt8Ty(), std::max<uint64_t>(Places.size(), 16)));
  Alloca->setAlignment(Align(16));
  Memory = Alloca;
  makeGiveUp();
  Value *Id = B.CreateLoad(B.getInt32Ty(), threadField(B, OffSite), "gw.site");
  B.CreateCall(M.getOrInsertFunction(name::Unpack, B.getVoidTy(), B.getPtrTy()), {Memory});

  // A call has one line, so where lines are wanted each site has a call. Where an anchor has to be dropped first, all
  // sites of a group have to be behind that of the function.
  const bool Apart = Clone->getSubprogram() != nullptr;
  MapVector<std::pair<Type *, unsigned>, SmallVector<const Site *>> Groups;
  Groups[{Type::getInt64Ty(C), 0}];
  for (const Site &S : Sites)
    Groups[{resultClass(S.Call->getType()), Apart ? S.Id : isAnchored(S)}].push_back(&S);
  SwitchInst *Dispatch = nullptr;
  for (const auto &[Kind, Members] : Groups) {
    if (Members.empty())
      continue;
    auto *Group = BasicBlock::Create(C, "gw.enter", Clone);
    if (!Dispatch)
      Dispatch = B.CreateSwitch(Id, Group);
    else
      for (const Site *S : Members)
        Dispatch->addCase(ConstantInt::get(B.getInt32Ty(), S->Id), Group);
    addGroup(Group, Kind.first, Members, Id);
  }
  for (const Site &S : Sites)
    giveUpAt(S);
}

// A value is stored where it is defined, and loaded once in each other block that uses it.
void MemoryCloner::useSlots(BasicBlock &BB) {
  DenseMap<Value *, Value *> Here;
  auto AtHand = [&](Value *V, Instruction *Before) {
    auto It = Offsets.find(V);
    if (It == Offsets.end())
      return V;
    Value *&Known = Here[V];
    if (!Known) {
      IRBuilder<> B(Before);
      Known = Frame::load(B, V->getType(), Memory, It->second, V->getName());
    }
    return Known;
  };
  auto Define = [&](Instruction *I, BasicBlock::iterator Behind) {
    Here[I] = I;
    IRBuilder<> B(&BB, Behind);
    Frame::store(B, I, Memory, Offsets.lookup(I));
  };

  // Stores of the phis come behind the last of them.
  for (PHINode &Phi : BB.phis())
    if (Offsets.contains(&Phi))
      Define(&Phi, BB.getFirstInsertionPt());
  for (Instruction &I : make_early_inc_range(make_range(BB.getFirstInsertionPt(), BB.end()))) {
    for (Use &U : I.operands())
      U.set(AtHand(U.get(), &I));
    if (Offsets.contains(&I))
      Define(&I, std::next(I.getIterator()));
  }
  for (BasicBlock *Next : successors(&BB))
    for (PHINode &Phi : Next->phis())
      for (unsigned K = 0; K < Phi.getNumIncomingValues(); ++K)
        if (Phi.getIncomingBlock(K) == &BB)
          Phi.setIncomingValue(K, AtHand(Phi.getIncomingValue(K), BB.getTerminator()));
}

Function *MemoryCloner::run() {
  cloneBody();
  findAlwaysDerived();
  addDispatch();
  // Users before operands, so that the copies of users are users of the operands' copies.
  for (Instruction *I : reverse(AlwaysDerived))
    deriveAtUses(cast<Instruction>(Map.lookup(I)));
  for (const Site &S : Sites)
    for (Value *V : S.Saved.values())
      Offsets[Map.lookup(V)] = Places.offset(V);
  // Now no use depends on another block's definition, so the order of the blocks does not matter.
  for (BasicBlock &BB : *Clone)
    if (&BB != Entry)
      useSlots(BB);
  EliminateUnreachableBlocks(*Clone);
  return Clone;
}

} // namespace

Function *makeResumeCloneInMemory(Function &F, ArrayRef<Site> Sites, const Slots &Places) {
  return MemoryCloner(F, Sites, Places).run();
}

} // namespace godwit
