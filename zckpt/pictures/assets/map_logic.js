/* What a map is made of, computed from the numbers in the page; no document, so that tests run it without a browser. */
const zckptMap = (data) => {
  const USUAL = [0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0];
  const names = data.tensors.names;
  const lower = names.map((name) => name.toLowerCase());
  const shapeOf = (t) => data.shapes[data.tensors.shapes[t]];
  const numelOf = (t) => shapeOf(t).reduce((all, extent) => all * extent, 1);
  const dtypeOf = (t) => data.dtypes[data.tensors.dtypes[t]];
  const bytesOf = (t) => numelOf(t) * dtypeOf(t)[1];
  const at = (layer, t) => (layer.tensors === null ? t : layer.index.has(t) ? layer.index.get(t) : -1);
  for (const side of data.sides)
    for (const layer of side.layers)
      if (layer.tensors !== null) layer.index = new Map(layer.tensors.map((t, place) => [t, place]));

  const grouped = (number) => String(number).replace(/^\d+/, (digits) => digits.replace(/\B(?=(\d{3})+$)/g, ","));
  const count = (number, noun, plural) => `${grouped(number)} ${number === 1 ? noun : plural || `${noun}s`}`;
  const size = (nbytes) => {
    if (nbytes < 1000) return count(Math.round(nbytes), "byte");
    const units = ["kB", "MB", "GB", "TB", "PB", "EB"];
    let power = 0;
    let value = nbytes / 1000;
    while (value >= 999.5 && power < units.length - 1) {
      value /= 1000;
      power += 1;
    }
    return `${grouped(Number(value.toPrecision(3)))} ${units[power]}`;
  };

  /* A name as it is shown: characters that show nothing, or turn what follows around, as escapes. */
  const visible = (name) => name.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (own) => `\\u${own.codePointAt(0).toString(16).padStart(4, "0")}`);

  /* The pieces of a tensor in a layer, repeated ones one by one. */
  const piecesOf = (layer, t) => {
    const place = at(layer, t);
    if (place < 0 || place >= layer.pieces.length) return [];
    const found = [];
    for (const short of layer.pieces[place]) {
      const p = USUAL.map((usual, k) => (k < short.length ? short[k] : usual));
      for (let n = 0; n < p[8]; n += 1)
        found.push({
          file: p[0] + n * p[9], byte: p[1] + n * p[10], start: p[2] + n * p[11],
          count: p[3], rows: p[4], pitch: p[5], storePitch: p[6], step: p[7],
        });
    }
    return found;
  };
  const itemsize = (layer, t) => data.dtypes[layer.dtypes[at(layer, t)]][1];
  const endOf = (piece, item) => piece.byte + ((piece.rows - 1) * piece.storePitch + (piece.count - 1) * piece.step + 1) * item;

  /* What lies in each file, by first byte: arrays of lo, hi, tensor, layer. Made once for a side. */
  const kept = new Map();
  const segmentsOf = (side, file) => {
    if (!kept.has(side)) {
      const lists = side.files.names.map(() => []);
      side.layers.forEach((layer, number) => {
        const tensors = layer.tensors === null ? layer.pieces.length : layer.tensors.length;
        for (let place = 0; place < tensors; place += 1) {
          const t = layer.tensors === null ? place : layer.tensors[place];
          const item = data.dtypes[layer.dtypes[place]][1];
          for (const piece of piecesOf(layer, t)) if (piece.file >= 0) lists[piece.file].push(piece.byte, endOf(piece, item), t, number);
        }
      });
      kept.set(side, lists.map((flat) => {
        const n = flat.length / 4;
        const order = Array.from({ length: n }, (_, k) => k).sort((a, b) => flat[4 * a] - flat[4 * b]);
        return {
          lo: Float64Array.from(order, (k) => flat[4 * k]), hi: Float64Array.from(order, (k) => flat[4 * k + 1]),
          tensor: Int32Array.from(order, (k) => flat[4 * k + 2]), layer: Uint8Array.from(order, (k) => flat[4 * k + 3]), length: n,
        };
      }));
    }
    return kept.get(side)[file];
  };
  /* The number of the segment at a byte, or -1. */
  const segmentAt = (segments, byte) => {
    let low = 0;
    let high = segments.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (segments.lo[middle] <= byte) low = middle + 1;
      else high = middle;
    }
    for (let k = low - 1; k >= 0 && k >= low - 8; k -= 1) if (segments.hi[k] > byte) return k;
    return -1;
  };

  /* Whether a file is gone, so that what is drawn in it is what it would hold. */
  const isGone = (side, file) => file >= 0 && data.gone.includes(side.files.states[file]);
  const room = (side, file) => (isGone(side, file) ? Math.max(side.files.bytes[file], side.files.expected[file]) : side.files.bytes[file] || side.files.expected[file]);
  /* Bytes of the largest file in each column; groups with the same columns are one grid, so it is that of all of them. */
  const columnBytes = (side, group) => {
    side.columns = side.columns || new Map();
    const key = group.columns.join("\n");
    if (!side.columns.has(key)) {
      const alike = side.groups.filter((own) => own.columns.join("\n") === key);
      side.columns.set(key, group.columns.map((_, k) => alike.reduce((most, own) => own.rows.reduce((all, [, files]) => Math.max(all, files[k] === null ? 0 : room(side, files[k])), most), 0)));
    }
    return side.columns.get(key);
  };
  /* Bytes that the widest row of all sides shows, so that sides have one scale. */
  const widest = () => {
    let most = { bytes: 1, cells: 1 };
    for (const side of data.sides)
      for (const group of side.groups) {
        let bytes = 0;
        let cells = group.columns.length;
        if (cells) bytes = columnBytes(side, group).reduce((all, own) => all + own, 0);
        else for (const [, own] of group.rows) {
          bytes = Math.max(bytes, own.reduce((all, file) => all + room(side, file), 0));
          cells = Math.max(cells, own.length);
        }
        if (bytes > most.bytes) most = { bytes, cells: most.cells };
        most.cells = Math.max(most.cells, cells);
      }
    return most;
  };
  /* Where everything is drawn, in a picture of this width: headings and rows with their cells, in pixels. */
  const LEAST = 3;
  const TITLE = 58;
  const geometry = (side, width, { labels = 130, row = 26, gap = 6, heading = 40, between = 10 } = {}) => {
    const most = widest();
    const free = Math.max(0, width - labels - (most.cells - 1) * between - most.cells * LEAST);
    /* Columns that are narrower than their titles get room for these. */
    const lacking = (group, own) => columnBytes(own, group).reduce((all, bytes) => all + Math.max(0, TITLE - LEAST - (bytes * free) / most.bytes), 0);
    const titles = Math.max(0, ...data.sides.flatMap((own) => own.groups.map((group) => (group.columns.length > 1 ? lacking(group, own) : 0))));
    const scale = Math.max(0, free - titles) / most.bytes;
    const wide = (bytes) => LEAST + bytes * scale;
    const lines = [];
    let y = 0;
    side.groups.forEach((group, number) => {
      lines.push({ kind: "heading", group: number, title: group.title, columns: [], y, height: heading });
      const head = lines[lines.length - 1];
      y += heading;
      const starts = [];
      let x = labels;
      group.columns.forEach((column, k) => {
        starts.push(x);
        const largest = columnBytes(side, group)[k];
        head.columns.push({ title: column, x, width: wide(largest) });
        x += (group.columns.length > 1 ? Math.max(TITLE, wide(largest)) : wide(largest)) + between;
      });
      for (const [label, own] of group.rows) {
        const cells = [];
        let next = labels;
        own.forEach((file, k) => {
          if (file === null) return;
          const w = wide(room(side, file));
          cells.push({ file, x: group.columns.length ? starts[k] : next, width: w });
          next += w + Math.min(between, 4);
        });
        lines.push({ kind: "row", group: number, label, cells, y, height: row });
        y += row + gap;
      }
      y += gap;
    });
    return { lines, height: y, scale, width };
  };
  const lineAt = (made, y) => {
    let low = 0;
    let high = made.lines.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (made.lines[middle].y <= y) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  };

  /* Tensors whose names have every word (or match a glob), of a role and dtype (null: of any), in an order. */
  const search = (query, { role = null, dtype = null, lacking = false, order = "model" } = {}) => {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
      if (!/[*?]/.test(word)) return (name) => name.includes(word);
      const pattern = word.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".");
      const glob = new RegExp(`^${pattern}$`, "s");
      return (name) => glob.test(name);
    });
    const found = [];
    for (let t = 0; t < names.length; t += 1)
      if ((role === null || data.tensors.roles[t] === role) && (dtype === null || data.tensors.dtypes[t] === dtype) && (!lacking || lost(data.sides[0], t)) && words.every((has) => has(lower[t])))
        found.push(t);
    if (order === "size") found.sort((a, b) => bytesOf(b) - bytesOf(a) || a - b);
    if (order === "name") found.sort((a, b) => (lower[a] < lower[b] ? -1 : lower[a] > lower[b] ? 1 : a - b));
    return found;
  };

  /* How many of a tensor's elements each file has, in the order of the elements: [[file, elements], ...]. */
  const shares = (side, t) => {
    const layer = side.layers[0];
    const found = new Map();
    if (layer) for (const piece of piecesOf(layer, t)) found.set(piece.file, (found.get(piece.file) || 0) + piece.count * piece.rows);
    return [...found];
  };

  /* How many of a tensor's weights lie in files that are gone. */
  const lost = (side, t) => shares(side, t).reduce((all, [file, numel]) => all + (isGone(side, file) ? numel : 0), 0);

  const indexes = (number, shape) => {
    const found = [];
    for (let k = shape.length - 1; k >= 0; k -= 1) {
      found.unshift(number % shape[k]);
      number = Math.floor(number / shape[k]);
    }
    return found;
  };
  const range = (first, last) => (first === last ? grouped(first) : `${grouped(first)} to ${grouped(last)}`);
  /* Which part of a tensor a piece is, in words: rows, columns, a box, or elements. */
  const partOf = (piece, shape) => {
    const numel = shape.reduce((all, extent) => all * extent, 1);
    const held = piece.count * piece.rows;
    if (held === numel) return "all of it";
    const first = piece.start;
    const last = piece.start + (piece.rows - 1) * piece.pitch + piece.count - 1;
    const low = indexes(first, shape);
    const high = indexes(last, shape);
    const isBox = low.every((from, k) => from <= high[k]) && low.reduce((all, from, k) => all * (high[k] - from + 1), 1) === held;
    if (isBox) {
      const cut = shape.map((extent, k) => k).filter((k) => low[k] > 0 || high[k] < shape[k] - 1);
      if (shape.length === 1) return `elements ${range(low[0], high[0])}`;
      if (shape.length === 2) return cut.map((k) => `${["row", "column"][k]}${low[k] === high[k] ? "" : "s"} ${range(low[k], high[k])}`).join(", ");
      return `[${low.map((from, k) => (cut.includes(k) ? `${from}:${high[k] + 1}` : ":")).join(", ")}]`;
    }
    return held === last - first + 1 ? `elements ${range(first, last)}` : `${count(piece.rows, "run")} of ${count(piece.count, "element")}, from ${grouped(first)} on`;
  };
  /* Rectangles of a piece in the tensor seen as a matrix of `columns` columns: at most three for a run, one for each part of rows. */
  const rectangles = (piece, columns, most = 512) => {
    const found = [];
    const run = (from, length) => {
      const row = Math.floor(from / columns);
      const column = from % columns;
      if (column + length <= columns) return found.push([column, row, length, 1]);
      let left = length;
      let next = row;
      if (column) {
        found.push([column, row, columns - column, 1]);
        left -= columns - column;
        next += 1;
      }
      const whole = Math.floor(left / columns);
      if (whole) found.push([0, next, columns, whole]);
      if (left % columns) found.push([0, next + whole, left % columns, 1]);
      return undefined;
    };
    const inRow = piece.start % columns;
    if (piece.rows > 1 && piece.pitch % columns === 0 && inRow + piece.count <= columns) {
      const apart = piece.pitch / columns;
      if (apart === 1) return [[inRow, Math.floor(piece.start / columns), piece.count, piece.rows]];
    }
    const every = Math.max(1, Math.ceil(piece.rows / most));
    for (let n = 0; n < piece.rows; n += every) run(piece.start + n * piece.pitch, piece.count);
    return found;
  };

  /* The number of a tensor's layer in the model, the first whole number in its name; -1 for none. */
  const layerNumber = (t) => {
    const found = /(?:^|[._/])(\d+)(?=[._/]|$)/.exec(names[t]);
    return found ? Number(found[1]) : -1;
  };
  /* File -> [row's label, group's title] of a side. */
  const homes = (side) => {
    const found = side.files.names.map(() => ["", ""]);
    for (const group of side.groups) for (const [label, own] of group.rows) for (const file of own) if (file !== null) found[file] = [label, group.title];
    return found;
  };
  const homeOf = (side, file) => {
    if (file < 0) return "computed from several ranks' copies";
    side.homes = side.homes || homes(side);
    const [label, title] = side.homes[file];
    return side.groups.length > 1 && !["Ranks", "Weights", "Files"].includes(title) && label !== side.files.names[file] ? `${title}, ${label}` : label;
  };
  const contents = (side) => {
    const found = side.layers.map(() => 0);
    side.layers.forEach((layer, number) => {
      const tensors = layer.tensors === null ? layer.pieces.map((_, t) => t) : layer.tensors;
      for (const t of tensors) for (const piece of piecesOf(layer, t)) if (piece.file >= 0 && !isGone(side, piece.file)) found[number] += piece.count * piece.rows * itemsize(layer, t);
    });
    return found;
  };

  /* The end of an address for a tensor, and the tensor of one; names that no address can have are left out. */
  const addressOf = (t) => {
    try {
      return t < 0 ? "" : `#tensor=${encodeURIComponent(names[t])}`;
    } catch {
      return "";
    }
  };
  const tensorAt = (hash) => {
    try {
      return hash.startsWith("#tensor=") ? names.indexOf(decodeURIComponent(hash.slice(8))) : -1;
    } catch {
      return -1;
    }
  };

  return {
    data, names, addressOf, tensorAt, shapeOf, numelOf, dtypeOf, bytesOf, grouped, count, size, visible, piecesOf, itemsize, endOf, segmentsOf, segmentAt, geometry, lineAt, search, isGone, room, lost,
    shares, partOf, rectangles, layerNumber, homeOf, contents,
  };
};
