// The blocks that give up a frame: they name the site, store what is live there, and return. Sites of a function mostly
// save the same values, so they share blocks: those that save all the same differ in their number only, and others
// meet where what is left to store is the same:
//
//     site 3:  br a       site 4:  br a      a:  %place = call @__gw_push(phi 3, 4)        site 9:  %p = call
//     @__gw_push(9)
//                                                store %x; br b                                     store %z; br b
//                                            b:  store %y to phi %place, %p; ret poison
//
// Shared for the sake of what is not cold more than for that of size: the allocators of registers weigh a value's uses
// against its length, and one that is live at all sites would be the longest of all.
#include "Program.h"
#include "Sites.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/IR/Instructions.h"
#include <map>

using namespace llvm;

namespace godwit {
namespace {

class Saves {
public:
  explicit Saves(Function &F) : F(F), M(*F.getParent()), C(F.getContext()) {}
  void run(MutableArrayRef<Site> Sites);

private:
  // One store, and what follows it.
  struct Store {
    Value *V = nullptr;
    uint64_t Offset = 0;
    // Index into Stores; the first of them is the return.
    unsigned Then = 0;
    unsigned Entries = 0;
    BasicBlock *Shared = nullptr;
    PHINode *Place = nullptr;
  };

  unsigned addStores(const Frame &Saved);
  void goOn(IRBuilder<> &B, Value *Place, unsigned Next);

  Function &F;
  Module &M;
  LLVMContext &C;
  std::vector<Store> Stores = std::vector<Store>(1);
  std::map<std::tuple<unsigned, Value *, uint64_t>, unsigned> Known;
};

// Those of a frame in its order; gives the first.
unsigned Saves::addStores(const Frame &Saved) {
  unsigned Next = 0;
  for (unsigned I = Saved.values().size(); I > 0; --I) {
    Value *V = Saved.values()[I - 1];
    uint64_t Offset = Saved.offsets()[I - 1];
    auto [Found, New] = Known.try_emplace({Next, V, Offset}, Stores.size());
    if (New) {
      Stores.push_back({V, Offset, Next});
      ++Stores[Next].Entries;
    }
    Next = Found->second;
  }
  ++Stores[Next].Entries;
  return Next;
}

// Ends a block with the stores from Next on, its own or those of a block that others go to as well.
void Saves::goOn(IRBuilder<> &B, Value *Place, unsigned Next) {
  for (; Next != 0; Next = Stores[Next].Then) {
    Store &S = Stores[Next];
    if (S.Entries > 1) {
      bool First = !S.Shared;
      if (First) {
        S.Shared = BasicBlock::Create(C, "gw.save.rest", &F);
        S.Place = PHINode::Create(B.getPtrTy(), S.Entries, "gw.place", S.Shared);
      }
      S.Place->addIncoming(Place, B.GetInsertBlock());
      B.CreateBr(S.Shared);
      if (!First)
        return;
      B.SetInsertPoint(S.Shared);
      Place = S.Place;
    }
    Frame::store(B, S.V, Place, S.Offset);
  }
  if (F.getReturnType()->isVoidTy())
    B.CreateRetVoid();
  else
    B.CreateRet(PoisonValue::get(F.getReturnType()));
}

void Saves::run(MutableArrayRef<Site> Sites) {
  // Sites that save the same begin with the same store.
  MapVector<unsigned, SmallVector<Site *>> Groups;
  for (Site &S : Sites)
    Groups[addStores(S.Saved)].push_back(&S);
  for (auto &[First, Members] : Groups)
    Stores[First].Entries -= Members.size() - 1;

  FunctionCallee Push = M.getOrInsertFunction(name::Push, PointerType::get(C, 0), Type::getInt32Ty(C));
  for (auto &[First, Members] : Groups) {
    auto *Save = BasicBlock::Create(C, "gw.save", &F);
    IRBuilder<> B(Save);
    Value *Number = B.getInt32(Members.front()->Id);
    if (Members.size() > 1) {
      PHINode *Numbers = B.CreatePHI(B.getInt32Ty(), Members.size(), "gw.number");
      for (Site *S : Members) {
        S->Save = BasicBlock::Create(C, "gw.site", &F, Save);
        IRBuilder<>(S->Save).CreateBr(Save);
        Numbers->addIncoming(B.getInt32(S->Id), S->Save);
      }
      Number = Numbers;
    } else {
      Members.front()->Save = Save;
    }
    CallInst *Place = B.CreateCall(Push, {Number});
    Place->setCallingConv(CallingConv::PreserveAll);
    Place->addFnAttr(Attribute::NoUnwind);
    goOn(B, Place, First);
  }
}

} // namespace

void makeSaves(Function &F, MutableArrayRef<Site> Sites) { Saves(F).run(Sites); }

} // namespace godwit
