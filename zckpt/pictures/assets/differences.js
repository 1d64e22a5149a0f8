(() => {
  const { at_once: atOnce, keys } = JSON.parse(document.getElementById("data").textContent);
  const body = document.getElementById("rows");
  if (!body) return;
  const all = [...body.rows].map((row, number) => ({ row, number, name: row.cells[0].firstElementChild.textContent }));
  const [search, sort, shown, before, after, pages] = ["search", "sort", "shown", "before", "after", "pages"].map((id) => document.getElementById(id));
  for (const { row } of all) row.hidden = false;
  let order = all;
  let wanted = all;
  let first = 0;
  const size = (entry, key) => keys[entry.number][key] ?? Infinity; // what could not be compared comes first
  const show = () => {
    body.replaceChildren(...wanted.slice(first, first + atOnce).map((entry) => entry.row));
    const last = Math.min(first + atOnce, wanted.length);
    const number = (n) => n.toLocaleString("en");
    const tensors = (n) => `${number(n)} tensor${n === 1 ? "" : "s"}`;
    const of = wanted.length === all.length ? tensors(all.length) : `${number(wanted.length)} found of ${tensors(all.length)}`;
    shown.textContent = wanted.length > atOnce ? `${number(first + 1)} to ${number(last)} of ${of}` : of;
    pages.hidden = wanted.length <= atOnce;
    before.disabled = first === 0;
    after.disabled = last >= wanted.length;
  };
  const find = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    wanted = words.length ? order.filter(({ name }) => words.every((word) => name.toLowerCase().includes(word))) : order;
    first = 0;
    show();
  };
  const arrange = () => {
    const by = sort.value;
    order = [...all].sort(by === "name" ? (x, y) => (x.name < y.name ? -1 : x.name > y.name ? 1 : 0) : (x, y) => {
      const [p, q] = [size(x, by), size(y, by)];
      return p === q ? x.number - y.number : q - p;
    });
    find();
  };
  const turn = (by) => {
    first = Math.max(0, first + by);
    show();
    document.getElementById("tensors").focus();
  };
  search.addEventListener("input", find);
  sort.addEventListener("change", arrange);
  before.addEventListener("click", () => turn(-atOnce));
  after.addEventListener("click", () => turn(atOnce));
  document.getElementById("tools").hidden = false;
  show();
})();
