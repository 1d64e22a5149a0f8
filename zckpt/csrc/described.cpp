#include "described.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "io.h"

namespace zckpt {

namespace {

struct Other {};  // thrown for whatever is not expected

constexpr size_t kWindow = 1 << 20, kMostArgument = 1 << 16, kMostDims = 64;
constexpr size_t kMostNodes = 1 << 20, kMostForms = 1 << 16, kMostPrefixes = 1 << 12, kMostAttributes = 64;
constexpr uint32_t kMostDepth = 32;
constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// A file's bytes in order, a window at a time.
class Stream {
 public:
  Stream(int fd, uint64_t nbytes) : fd_(fd), left_(nbytes), buffer_(kWindow + kMostArgument) {}
  uint64_t rest() const { return left_ + (stop_ - at_); }
  uint8_t byte() { return static_cast<uint8_t>(take(1)[0]); }
  // The next bytes, until the next call.
  std::string_view take(size_t nbytes) {
    if (stop_ - at_ < nbytes) fill(nbytes);
    at_ += nbytes;
    return {buffer_.data() + at_ - nbytes, nbytes};
  }
  uint64_t number(size_t nbytes) {
    const auto data = take(nbytes);
    uint64_t value = 0;
    for (size_t n = 0; n < nbytes; ++n) value |= uint64_t{static_cast<uint8_t>(data[n])} << (8 * n);
    return value;
  }
  int64_t whole(size_t nbytes) {  // signed
    if (!nbytes) return 0;
    const uint64_t value = number(nbytes);
    const unsigned shift = 64 - 8 * static_cast<unsigned>(nbytes);
    return static_cast<int64_t>(value << shift) >> shift;
  }

 private:
  void fill(size_t nbytes) {
    if (nbytes > kMostArgument) throw Other{};
    std::memmove(buffer_.data(), buffer_.data() + at_, stop_ - at_);
    stop_ -= at_;
    at_ = 0;
    const size_t more = std::min<uint64_t>(left_, buffer_.size() - stop_);
    if (stop_ + more < nbytes || read_all(fd_, buffer_.data() + stop_, more, from_)) throw Other{};
    stop_ += more;
    from_ += more;
    left_ -= more;
  }
  int fd_;
  uint64_t left_, from_ = 0;
  std::vector<char> buffer_;
  size_t at_ = 0, stop_ = 0;
};

// The entries of the memo that a pickle gets, one bit each.
class Used {
 public:
  void add(uint64_t number) {
    if (number > kNone) throw Other{};
    if (bits_.size() <= number / 64) bits_.resize(number / 64 + 1 + bits_.size() / 2);
    count_ += !has(number);
    bits_[number / 64] |= 1ull << (number % 64);
  }
  bool has(uint64_t number) const { return number / 64 < bits_.size() && bits_[number / 64] >> (number % 64) & 1; }
  size_t count() const { return count_; }

 private:
  std::vector<uint64_t> bits_;
  size_t count_ = 0;
};

// Goes through a pickle once, without carrying it out.
Used used_in(int fd, uint64_t nbytes) {
  Stream in(fd, nbytes);
  Used used;
  while (true) {
    switch (const uint8_t code = in.byte()) {
      case '.': return used;
      case 'h': used.add(in.byte()); break;
      case 'j': used.add(in.number(4)); break;
      case 0x80: case 'K': in.take(1); break;
      case 'M': in.take(2); break;
      case 'J': in.take(4); break;
      case 0x95: in.take(8); break;
      case 'X': in.take(in.number(4)); break;
      case 0x8c: case 0x8a: in.take(in.byte()); break;
      default:
        if (!std::strchr("(N)]}tRbaesu", code) && (code < 0x85 || code > 0x89) && code != 0x81 && code != 0x93 && code != 0x94) throw Other{};
        if (!code) throw Other{};
    }
  }
}

enum class Kind : uint8_t {
  kNothing, kTrue, kFalse, kNumber, kName,  // without a node
  kText, kGlobal, kTuple, kDict, kList, kShape, kLayout, kOpaque,
  kObject,      // of one of torch's classes, whose name is `text`
  kProperties,  // `text`: the dtype
  kBox, kTensor, kIndex, kPlace,
};

struct Node;

class Value {
 public:
  Value() = default;
  explicit Value(Kind kind, int64_t number = 0) : kind(kind), number(number) {}
  explicit Value(Node* node);
  Value(const Value& other) : kind(other.kind), number(other.number), node_(other.node_) { hold(); }
  Value(Value&& other) noexcept : kind(other.kind), number(other.number), node_(other.node_) { other.node_ = nullptr; }
  Value& operator=(Value other) noexcept {
    std::swap(kind, other.kind);
    std::swap(number, other.number);
    std::swap(node_, other.node_);
    return *this;
  }
  ~Value() { drop(); }
  Node* operator->() const { return node_; }
  Node& node() const { return *node_; }
  Kind what() const;
  bool is(Kind one) const { return what() == one; }
  bool has_node() const { return node_; }

  Kind kind = Kind::kNothing;
  int64_t number = 0;

 private:
  void hold() const;
  void drop();
  Node* node_ = nullptr;
};

struct Node {
  Kind kind;
  uint32_t refs = 0;
  uint32_t memo = kNone;  // where in the memo it is
  std::string text;
  std::vector<Value> items;
  std::vector<int64_t> numbers;
  uint32_t depth = 0;  // of what is in it
  bool flag = false;   // of a dict: whether its entries went into columns
  static thread_local size_t count;
  explicit Node(Kind of) : kind(of) {
    if (++count > kMostNodes) {
      --count;
      throw Other{};
    }
  }
  ~Node() { --count; }
  // What is put into another object is not changed any more, so that nothing is deeper than this says.
  void hold(const Value& value);
};
thread_local size_t Node::count = 0;

Value::Value(Node* node) : node_(node) { hold(); }
void Value::hold() const {
  if (node_) ++node_->refs;
}
void Value::drop() {
  if (node_ && !--node_->refs) delete node_;
}
void Node::hold(const Value& value) {
  if (value.has_node()) depth = std::max(depth, value->depth + 1);
  if (depth > kMostDepth) throw Other{};
}
Kind Value::what() const { return node_ ? node_->kind : kind; }

bool is_text(const Value& value, std::string_view text) { return value.is(Kind::kText) && value->text == text; }

constexpr std::string_view kClasses[] = {"torch.distributed.checkpoint.metadata\n", "torch.distributed.checkpoint.filesystem\n"};

}  // namespace

std::string_view Described::named(uint32_t id) const {
  const uint64_t begin = id ? ends_[id - 1] : 0;
  return {names_.data() + begin + 1, ends_[id] - begin - 1};
}

std::string_view Described::name(size_t number) const { return named(order_.empty() ? static_cast<uint32_t>(number) : order_[number]); }

size_t Described::slot(std::string_view name) const {
  size_t at = std::hash<std::string_view>{}(name) & (slots_.size() - 1);
  while (slots_[at] && named(slots_[at] - 1) != name) at = (at + 1) & (slots_.size() - 1);
  return at;
}

int64_t Described::find(std::string_view name) const {
  if (slots_.empty()) return -1;
  const uint32_t id = slots_[slot(name)];
  if (!id) return -1;
  return int64_t{places_.empty() ? id - 1 : places_[id - 1]};
}

std::vector<uint32_t> Described::in_order() const {
  std::vector<uint32_t> numbers(size());
  std::iota(numbers.begin(), numbers.end(), 0);
  std::sort(numbers.begin(), numbers.end(), [&](uint32_t a, uint32_t b) { return name(a) < name(b); });
  return numbers;
}

// Carries a pickle out, as far as that is what torch writes; the entries of its three dicts go into columns.
class DescribedReader {
 public:
  DescribedReader(int fd, uint64_t nbytes) : used_(used_in(fd, nbytes)), in_(fd, nbytes), made_(std::make_unique<Described>()) {
    made_->names_.reserve(nbytes / 2);  // pages that are not written to take no memory
    memo_numbers_.reserve(used_.count());
    memo_.reserve(used_.count());
    made_->slots_.assign(1 << 10, 0);
  }

  std::unique_ptr<Described> read() {
    while (step()) {
    }
    finish();
    return std::move(made_);
  }

 private:
  Value make(Kind kind) {
    return Value(new Node(kind));
  }
  void push(Value value) { stack_.push_back(std::move(value)); }
  Value& top() {
    if (stack_.empty()) throw Other{};
    return stack_.back();
  }
  Value pop() {
    Value value = std::move(top());
    stack_.pop_back();
    return value;
  }
  size_t pop_mark() {
    if (marks_.empty() || marks_.back() > stack_.size()) throw Other{};
    const size_t mark = marks_.back();
    marks_.pop_back();
    return mark;
  }
  void tuple(size_t from) {
    if (from > stack_.size()) throw Other{};
    Value made = make(Kind::kTuple);
    for (size_t n = from; n < stack_.size(); ++n) made->hold(stack_[n]);
    made->items.assign(std::make_move_iterator(stack_.begin() + static_cast<ptrdiff_t>(from)), std::make_move_iterator(stack_.end()));
    stack_.resize(from);
    push(std::move(made));
  }
  void text(size_t nbytes) {
    const auto data = in_.take(nbytes);
    if (std::any_of(data.begin(), data.end(), [](char c) { return static_cast<uint8_t>(c) > 0x7e || static_cast<uint8_t>(c) < 0x20; })) throw Other{};
    Value made = make(Kind::kText);
    made->text = data;
    push(std::move(made));
  }
  void get(uint64_t number) {
    const auto at = std::lower_bound(memo_numbers_.begin(), memo_numbers_.end(), number);
    if (at == memo_numbers_.end() || *at != number) throw Other{};
    push(memo_[static_cast<size_t>(at - memo_numbers_.begin())]);
  }
  void memoize() {
    if (used_.has(memoized_)) {
      top();
      if (top().has_node()) top()->memo = static_cast<uint32_t>(memo_.size());
      memo_numbers_.push_back(static_cast<uint32_t>(memoized_));
      memo_.push_back(top());
    }
    ++memoized_;
  }

  bool step() {
    switch (const uint8_t code = in_.byte()) {
      case '.': return false;
      case 0x80:
        if (in_.byte() != 4) throw Other{};
        break;
      case 0x95:
        if (in_.number(8) > in_.rest()) throw Other{};
        break;
      case '(': marks_.push_back(stack_.size()); break;
      case 'N': push(Value(Kind::kNothing)); break;
      case 0x88: push(Value(Kind::kTrue)); break;
      case 0x89: push(Value(Kind::kFalse)); break;
      case 'K': push(Value(Kind::kNumber, in_.byte())); break;
      case 'M': push(Value(Kind::kNumber, static_cast<int64_t>(in_.number(2)))); break;
      case 'J': push(Value(Kind::kNumber, in_.whole(4))); break;
      case 0x8a: {
        const size_t nbytes = in_.byte();
        if (nbytes > 8) throw Other{};
        push(Value(Kind::kNumber, in_.whole(nbytes)));
        break;
      }
      case 0x8c: text(in_.byte()); break;
      case 'X': text(in_.number(4)); break;
      case ')': push(make(Kind::kTuple)); break;
      case ']': push(make(Kind::kList)); break;
      case '}': push(make(Kind::kDict)); break;
      case 't': tuple(pop_mark()); break;
      case 0x85: case 0x86: case 0x87:
        if (stack_.size() < code - 0x84u) throw Other{};
        tuple(stack_.size() - (code - 0x84u));
        break;
      case 0x94: memoize(); break;
      case 'h': get(in_.byte()); break;
      case 'j': get(in_.number(4)); break;
      case 0x93: {
        const Value name = pop(), module = pop();
        if (!name.is(Kind::kText) || !module.is(Kind::kText)) throw Other{};
        Value made = make(Kind::kGlobal);
        made->text = module->text + "\n" + name->text;
        push(std::move(made));
        break;
      }
      case 0x81: make_object(); break;
      case 'R': call(); break;
      case 'b': build(); break;
      case 'a': append(stack_.size() - 1); break;
      case 'e': append(pop_mark()); break;
      case 's':
        if (stack_.size() < 3) throw Other{};
        set_items(stack_.size() - 2);
        break;
      case 'u': set_items(pop_mark()); break;
      default: throw Other{};
    }
    return true;
  }

  void make_object() {
    const Value args = pop();
    if (!args.is(Kind::kTuple) || !args->items.empty() || !top().is(Kind::kGlobal)) throw Other{};
    const std::string_view text = top()->text;
    const auto* from = std::find_if(std::begin(kClasses), std::end(kClasses), [&](std::string_view one) { return text.starts_with(one); });
    if (from == std::end(kClasses)) throw Other{};
    Value made = make(Kind::kObject);
    made->text = text.substr(from->size());
    stack_.back() = std::move(made);
  }

  void call() {
    const Value args = pop();
    if (!args.is(Kind::kTuple) || !top().is(Kind::kGlobal)) throw Other{};
    const std::string& function = top()->text;
    const auto& items = args->items;
    Value made;
    if (function == "torch\nSize") {
      if (items.size() != 1 || !items[0].is(Kind::kTuple) || items[0]->items.size() > kMostDims) throw Other{};
      made = make(Kind::kShape);
      for (const auto& extent : items[0]->items) {
        if (!extent.is(Kind::kNumber) || extent.number < 0) throw Other{};
        made->numbers.push_back(extent.number);
      }
    } else if (function == "torch.serialization\n_get_layout" && items.size() == 1 && is_text(items[0], "torch.strided")) {
      made = make(Kind::kLayout);
    } else if (function == "torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING" || function == "pathlib\nPosixPath") {
      made = make(Kind::kOpaque);
    } else {
      throw Other{};
    }
    stack_.back() = std::move(made);
  }

  // The value of an attribute; none where it is not there.
  static const Value& at(const Value& state, std::string_view key) {
    static const Value nothing;
    if (!state.is(Kind::kDict)) throw Other{};
    const Value* found = &nothing;
    for (size_t n = 0; n + 1 < state->items.size(); n += 2) {
      if (!state->items[n].is(Kind::kText)) throw Other{};
      if (state->items[n]->text == key) found = &state->items[n + 1];
    }
    return *found;
  }
  static size_t attributes(const Value& state) { return state->items.size() / 2; }

  void build() {
    const Value state = pop();
    if (!top().is(Kind::kObject) || !top()->items.empty()) throw Other{};
    Node& target = top().node();
    if (target.text == "ChunkStorageMetadata") {
      const Value &offsets = at(state, "offsets"), &sizes = at(state, "sizes");
      if (!offsets.is(Kind::kShape) || !sizes.is(Kind::kShape) || offsets->numbers.size() != sizes->numbers.size() || attributes(state) != 2) throw Other{};
      if (std::any_of(offsets->numbers.begin(), offsets->numbers.end(), [](int64_t n) { return n != 0; })) throw Other{};
      target.numbers = sizes->numbers;
      target.kind = Kind::kBox;
    } else if (target.text == "TensorProperties") {
      if (!state.is(Kind::kTuple) || state->items.size() < 2) throw Other{};
      const Value &dtype = state->items[0], &layout = state->items[1];
      if (!dtype.is(Kind::kGlobal) || !dtype->text.starts_with("torch\n") || !layout.is(Kind::kLayout)) throw Other{};
      target.text = dtype->text.substr(6);
      target.kind = Kind::kProperties;
    } else if (target.text == "TensorStorageMetadata") {
      const Value &properties = at(state, "properties"), &size = at(state, "size"), &chunks = at(state, "chunks");
      if (!properties.is(Kind::kProperties) || !size.is(Kind::kShape) || !chunks.is(Kind::kList) || attributes(state) != 3) throw Other{};
      if (chunks->items.size() != 1 || !chunks->items[0].is(Kind::kBox) || chunks->items[0]->numbers != size->numbers) throw Other{};
      target.numbers = size->numbers;
      target.text = properties->text;
      target.kind = Kind::kTensor;
    } else if (target.text == "MetadataIndex") {
      const Value &name = at(state, "fqn"), &offset = at(state, "offset");
      if (!name.is(Kind::kText) && !name.is(Kind::kName)) throw Other{};
      if (!offset.is(Kind::kShape)) throw Other{};
      target.items = {name};
      target.numbers = offset->numbers;
      target.kind = Kind::kIndex;
    } else if (target.text == "_StorageInfo") {
      const Value &path = at(state, "relative_path"), &offset = at(state, "offset"), &length = at(state, "length");
      if (!path.is(Kind::kText) || !offset.is(Kind::kNumber) || !length.is(Kind::kNumber) || offset.number < 0 || length.number < 0) throw Other{};
      const Value& transforms = at(state, "transform_descriptors");
      if (!transforms.is(Kind::kNothing)) throw Other{};
      target.items = {path};
      target.numbers = {offset.number, length.number};
      target.kind = Kind::kPlace;
    } else if (target.text == "StorageMeta") {
      target.kind = Kind::kOpaque;
    } else if (target.text == "Metadata") {
      if (!state.is(Kind::kDict) || target.refs != 1) throw Other{};
      target.items = {state};
    } else {
      throw Other{};
    }
  }

  void append(size_t from) {
    if (!from || from > stack_.size() || !stack_[from - 1].is(Kind::kList)) throw Other{};
    auto& items = stack_[from - 1]->items;
    if (items.size() + (stack_.size() - from) != 1 || stack_[from - 1]->refs != 1) throw Other{};  // several chunks of a tensor
    stack_[from - 1]->hold(stack_[from]);
    for (size_t n = from; n < stack_.size(); ++n) items.push_back(std::move(stack_[n]));
    stack_.resize(from);
  }

  void set_items(size_t from) {
    if (!from || from > stack_.size() || (stack_.size() - from) % 2 || !stack_[from - 1].is(Kind::kDict)) throw Other{};
    Node& target = stack_[from - 1].node();
    const size_t place = from - 1;
    // Metadata, its attributes, MARK, and of these one name and one dict after the other
    const bool in_root = marks_.size() == 1 && marks_[0] == 2 && place > 2 && place % 2 && stack_[0].is(Kind::kObject) && stack_[place - 1].is(Kind::kText);
    const auto section = in_root ? std::string_view(stack_[place - 1]->text) : std::string_view();
    void (DescribedReader::*commit)(Value&, Value&) = section == "state_dict_metadata" ? &DescribedReader::describe
                                                      : section == "planner_data"      ? &DescribedReader::put_path
                                                      : section == "storage_data"      ? &DescribedReader::put_place
                                                                                       : nullptr;
    if (target.refs != 1 || (!commit && target.items.size() + stack_.size() - from > kMostAttributes)) throw Other{};
    for (size_t n = from; n < stack_.size(); n += 2) {
      if (commit) {
        (this->*commit)(stack_[n], stack_[n + 1]);
      } else {
        target.hold(stack_[n + 1]);
        target.items.push_back(std::move(stack_[n]));
        target.items.push_back(std::move(stack_[n + 1]));
      }
    }
    target.flag |= commit != nullptr;
    stack_.resize(from);
  }

  // The number of a name as it was described; none if it was not.
  uint32_t id_of(const Value& name) const {
    if (name.is(Kind::kName)) return static_cast<uint32_t>(name.number);
    if (!name.is(Kind::kText)) throw Other{};
    const uint32_t known = made_->slots_[made_->slot(name->text)];
    return known ? known - 1 : kNone;
  }

  void describe(Value& name, Value& value) {
    if (!name.is(Kind::kText) || !value.is(Kind::kTensor)) throw Other{};
    auto& made = *made_;
    const auto id = static_cast<uint32_t>(made.ends_.size());
    if (made.slots_.size() < 2 * (size_t{id} + 1)) {
      made.slots_.assign(2 * made.slots_.size(), 0);
      for (uint32_t n = 0; n < id; ++n) made.slots_[made.slot(made.named(n))] = n + 1;
    }
    const size_t slot = made.slot(name->text);
    if (made.slots_[slot] || id == kNone - 1) throw Other{};
    made.names_ += '\0';
    made.names_ += name->text;
    made.ends_.push_back(made.names_.size());
    made.slots_[slot] = id + 1;
    made.form.push_back(form_of(value.node()));
    made.prefix.push_back(kNone);
    made.file.push_back(-1);
    made.offset.push_back(0);
    made.length.push_back(0);
    if (const uint32_t memo = name->memo; memo != kNone) memo_[memo] = Value(Kind::kName, id);
  }

  uint32_t form_of(const Node& tensor) {
    auto& forms = made_->forms;
    if (last_form_ < forms.size() && forms[last_form_].dtype == tensor.text && forms[last_form_].shape == tensor.numbers) return last_form_;
    std::string key = tensor.text;
    key.append(reinterpret_cast<const char*>(tensor.numbers.data()), tensor.numbers.size() * sizeof(int64_t));  // NOLINT
    const auto [at, is_new] = forms_.try_emplace(key, static_cast<uint32_t>(forms.size()));
    if (is_new) {
      unsigned __int128 numel = 1;
      for (int64_t extent : tensor.numbers) {
        numel *= static_cast<uint64_t>(extent);
        if (numel > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) throw Other{};
      }
      if (forms.size() == kMostForms) throw Other{};
      forms.push_back({tensor.text, tensor.numbers});
    }
    return last_form_ = at->second;
  }

  void put_path(Value& name, Value& path) {
    const uint32_t id = id_of(name);
    if (!path.is(Kind::kTuple) || path->items.empty()) throw Other{};
    if (id == kNone) return;
    std::string prefix, joined;
    for (size_t n = 0; n < path->items.size(); ++n) {
      const std::string part = part_of(path->items[n]);
      if (part.empty()) throw Other{};
      joined += (n ? "." : "") + part;
      if (n + 1 < path->items.size()) prefix += (n ? "\n" : "") + part;
    }
    if (joined != made_->named(id) || made_->prefix[id] != kNone) throw Other{};
    const auto [at, is_new] = prefixes_.try_emplace(prefix, static_cast<uint32_t>(made_->prefixes.size()));
    if (is_new) {
      if (made_->prefixes.size() == kMostPrefixes) throw Other{};
      made_->prefixes.push_back(prefix);
    }
    made_->prefix[id] = at->second;
    made_->order_.push_back(id);
  }

  std::string part_of(const Value& part) const {
    if (part.is(Kind::kName)) return std::string(made_->named(static_cast<uint32_t>(part.number)));
    if (!part.is(Kind::kText)) throw Other{};
    return part->text;
  }

  void put_place(Value& index, Value& place) {
    if (!index.is(Kind::kIndex) || !place.is(Kind::kPlace)) throw Other{};
    const uint32_t id = id_of(index->items[0]);
    if (id == kNone) return;
    auto& made = *made_;
    const auto& shape = made.forms[made.form[id]].shape;
    if (index->numbers.size() != shape.size() || made.file[id] >= 0) throw Other{};
    if (std::any_of(index->numbers.begin(), index->numbers.end(), [](int64_t n) { return n != 0; })) throw Other{};
    const auto [at, is_new] = files_.try_emplace(place->items[0]->text, static_cast<int32_t>(made.files.size()));
    if (is_new) made.files.push_back(place->items[0]->text);
    made.file[id] = at->second;
    made.offset[id] = place->numbers[0];
    made.length[id] = place->numbers[1];
  }

  void finish() {
    auto& made = *made_;
    if (stack_.size() != 1 || !marks_.empty() || !stack_[0].is(Kind::kObject) || stack_[0]->text != "Metadata" || stack_[0]->items.empty()) throw Other{};
    const Value& state = stack_[0]->items[0];
    for (const char* key : {"state_dict_metadata", "storage_data"})
      if (const Value& section = at(state, key); !section.is(Kind::kDict) || !section->flag) throw Other{};
    for (const char* key : {"mcore_data", "all_local_plans"})
      if (!at(state, key).is(Kind::kNothing)) throw Other{};
    if (const Value& paths = at(state, "planner_data"); !paths.is(Kind::kNothing) && !paths.is(Kind::kDict)) throw Other{};
    if (const Value& version = at(state, "version"); version.is(Kind::kText)) made.version = version->text;
    for (size_t id = 0; id < made.file.size(); ++id)
      if (const auto& shape = made.forms[made.form[id]].shape; made.file[id] < 0 && std::find(shape.begin(), shape.end(), 0) == shape.end()) throw Other{};
    stack_.clear();
    memo_ = {};
    memo_numbers_ = {};
    used_ = {};
    put_in_order();
  }

  void put_in_order() {
    auto& made = *made_;
    auto& order = made.order_;
    const auto top = static_cast<uint32_t>(made.prefixes.size());
    bool is_new = false;
    for (uint32_t id = 0; id < made.prefix.size(); ++id)
      if (made.prefix[id] == kNone) {
        const auto known = prefixes_.find("");
        made.prefix[id] = known == prefixes_.end() ? top : known->second;
        is_new |= known == prefixes_.end();
        order.push_back(id);
      }
    if (is_new) made.prefixes.emplace_back();
    const auto moved = [&](auto& column) {
      auto old = column;
      for (size_t n = 0; n < order.size(); ++n) column[n] = old[order[n]];
    };
    if (std::is_sorted(order.begin(), order.end())) {
      order = {};
      return;
    }
    moved(made.form), moved(made.prefix), moved(made.file), moved(made.offset), moved(made.length);
    made.places_.resize(order.size());
    for (size_t n = 0; n < order.size(); ++n) made.places_[order[n]] = static_cast<uint32_t>(n);
  }

  Used used_;
  Stream in_;
  std::unique_ptr<Described> made_;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;
  std::vector<uint32_t> memo_numbers_;
  std::vector<Value> memo_;
  uint64_t memoized_ = 0;
  uint32_t last_form_ = kNone;
  std::unordered_map<std::string, uint32_t> forms_, prefixes_;
  std::unordered_map<std::string, int32_t> files_;
};

std::unique_ptr<Described> read_described(int fd, uint64_t nbytes) {
  try {
    return DescribedReader(fd, nbytes).read();
  } catch (const Other&) {
    return nullptr;
  }
}

}  // namespace zckpt
