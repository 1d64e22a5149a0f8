/* Shows the map: bars on canvases, the list of tensors in rows that are made when they come into view, and one tensor in detail. */
(() => {
  const map = zckptMap(JSON.parse(document.getElementById("data").textContent));
  const { data, names, grouped, count, size } = map;
  const $ = (id) => document.getElementById(id);
  const made = (tag, own = {}, ...inside) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(own)) {
      if (key === "class") element.className = value;
      else element.setAttribute(key, value);
    }
    element.append(...inside);
    return element;
  };
  const quoted = (content) => made("bdi", {}, map.visible(String(content)));
  const narrow = matchMedia("(max-width: 640px)");
  const PALETTE = ["a", "b", "c", "d", "e", "f", "g", "h"];
  const HOLDERS = 24;
  let colours = {};
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    const names = [...PALETTE, "rest", "page", "card", "sunk", "line", "strong", "text", "soft", "bad", "bad-back", "warn", "warn-back", "focus"];
    colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    colours.dark = style.colorScheme.trim() === "dark";
  };
  const holder = (n) => (n < 0 ? colours.rest : n < 8 ? colours[PALETTE[n]] : `hsl(${(n * 137.5) % 360} 48% ${colours.dark ? 62 : 46}%)`);

  /* What colours mean. */
  const deepest = names.reduce((most, _, t) => Math.max(most, map.layerNumber(t)), 0);
  const depth = (n) => (n < 0 ? colours.rest : `hsl(${205 + (150 * n) / Math.max(1, deepest)} ${colours.dark ? 62 : 55}% ${colours.dark ? 64 : 47}%)`);
  const tones = {
    contents: (side, layer) => colours[PALETTE[data.colours[side.layers[layer].name]]],
    layer: (side, layer, t) => depth(map.layerNumber(t)),
    role: (side, layer, t) => colours[PALETTE[data.tensors.roles[t]]],
    dtype: (side, layer, t) => colours[PALETTE[side.layers[layer].dtypeOf(t) % 8]],
  };
  for (const side of data.sides)
    for (const layer of side.layers) layer.dtypeOf = (t) => layer.dtypes[layer.tensors === null ? t : layer.index.get(t)];
  let tone = "contents";
  /* Where tensors are not known, a colour for each kind of file. */
  const kinds = [...new Set(data.sides[0].files.kinds)].slice(0, 7);
  const kindTone = (kind) => (kinds.includes(kind) && kind !== "other" ? colours[PALETTE[(kinds.indexOf(kind) + 1) % 8]] : colours.rest);
  const used = { layer: new Set(), role: new Set(data.tensors.roles), dtype: new Set() };
  for (const side of data.sides) for (const layer of side.layers) for (const dtype of layer.dtypes) used.dtype.add(dtype);
  const states = new Set(data.sides.flatMap((side) => side.files.states));
  const legend = () => {
    const keys = [];
    if (tone === "contents") for (const [name, number] of Object.entries(data.colours)) keys.push([name, colours[PALETTE[number]]]);
    if (tone === "layer") keys.push(["first layers", depth(0)], [`to layer ${deepest}`, depth(deepest)], ["outside of layers", colours.rest]);
    if (tone === "role") for (const role of used.role) keys.push([data.roles[role], colours[PALETTE[role]]]);
    if (tone === "dtype") for (const dtype of used.dtype) keys.push([data.dtypes[dtype][0], colours[PALETTE[dtype % 8]]]);
    if (data.sides.some((side) => side.layers.length)) keys.push(["paler: every second tensor", "paler"], ["other: indexes, counters, padding", colours.sunk]);
    else for (const kind of kinds) keys.push([`${kind} file`, kindTone(kind)]);
    if (["missing", "empty", "unreadable"].some((state) => states.has(state))) keys.push(["missing or damaged", "bad"]);
    if (["other save", "extra"].some((state) => states.has(state))) keys.push(["of another save", "warn"]);
    $("legend").replaceChildren(...keys.map(([name, colour]) => {
      const key = made("i", { class: `key${["bad", "warn", "paler"].includes(colour) ? ` ${colour}` : ""}`, "aria-hidden": "true" });
      if (!["bad", "warn", "paler"].includes(colour)) key.style.background = colour;
      return made("li", {}, key, name);
    }));
  };

  /* One tensor is shown: the one that is pointed at, or else the one that is kept. */
  let pointed = -1;
  let kept = -1;
  const shown = () => (pointed >= 0 ? pointed : kept);
  const say = (text) => { $("live").textContent = text; };

  class Picture {
    constructor(side) {
      this.side = side;
      this.base = made("canvas", { "aria-hidden": "true" });
      this.over = made("canvas", { "aria-hidden": "true" });
      this.spacer = made("div", { class: "spacer" });
      this.box = made("div", {
        class: "scroller", tabindex: "0", role: "application", "aria-roledescription": "map of files",
        "aria-label": `${side.title}: ${count(side.files.names.length, "file")}. Arrow keys move, Enter keeps a tensor. The same is in the table below.`,
      }, made("div", { class: "stage" }, this.base, this.over), this.spacer);
      this.root = made("div", { class: "side" });
      if (data.sides.length > 1) this.root.append(made("h3", {}, side.title));
      this.root.append(this.box);
      this.cursor = { line: -1, cell: 0, segment: -1 };
      this.box.addEventListener("scroll", () => this.draw());
      this.box.addEventListener("pointermove", (event) => this.point(event));
      this.box.addEventListener("pointerleave", () => { hide(); point(-1); });
      this.box.addEventListener("click", (event) => {
        const hit = this.hit(event);
        keep(hit && hit.tensor >= 0 && hit.tensor !== kept ? hit.tensor : -1);
      });
      this.box.addEventListener("keydown", (event) => this.key(event));
      this.box.addEventListener("blur", () => { this.cursor.line = -1; hide(); point(-1); this.light(); });
    }

    measure() {
      const width = this.root.clientWidth;
      const options = narrow.matches ? { labels: 76, row: 24, between: 6 } : {};
      this.made = map.geometry(this.side, width, { ...options, labels: Math.min(this.labels(), width * 0.34) });
      this.spacer.style.height = `${this.made.height}px`;
      this.height = Math.min(this.made.height, Math.max(720, Math.round(innerHeight * 0.8)));
      this.box.style.height = `${this.height + 2}px`;
      for (const canvas of [this.base, this.over]) {
        canvas.width = Math.round(width * devicePixelRatio);
        canvas.height = Math.round(this.height * devicePixelRatio);
        canvas.style.width = `${width}px`;
        canvas.style.height = `${this.height}px`;
      }
      this.draw();
    }

    labels() {
      const context = this.base.getContext("2d");
      context.font = FONT;
      let most = 40;
      let looked = 0;
      for (const group of this.side.groups) for (const [label] of group.rows) {
        if ((looked += 1) > 400) break;
        most = Math.max(most, context.measureText(label).width);
      }
      return Math.min(most + 18, 260);
    }

    visible() {
      const first = Math.max(0, map.lineAt(this.made, this.box.scrollTop));
      const found = [];
      for (let n = first; n < this.made.lines.length && this.made.lines[n].y < this.box.scrollTop + this.height; n += 1) found.push(this.made.lines[n]);
      return found;
    }

    clean(canvas) {
      const context = canvas.getContext("2d");
      context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
      context.clearRect(0, 0, this.made.width, this.height);
      context.translate(0, -Math.round(this.box.scrollTop));
      context.font = FONT;
      context.textBaseline = "middle";
      return context;
    }

    draw() {
      const context = this.clean(this.base);
      const labels = this.made.width && this.labelWidth();
      for (const line of this.visible()) {
        if (line.kind === "heading") {
          context.fillStyle = colours.strong;
          context.font = `600 ${FONT}`;
          const columns = line.columns.length > 1 || (line.columns[0] && line.columns[0].title !== "other" && this.side.groups.length < 2);
          const room = columns ? line.columns[0].x - 10 : this.made.width;
          const title = cut(context, line.title, columns ? Math.max(room, 0) : room);
          const twoLines = columns && title.endsWith("\u2026");
          context.fillText(twoLines ? cut(context, line.title, this.made.width) : title, 0, line.y + (twoLines ? 9 : 22));
          context.font = FONT;
          context.fillStyle = colours.soft;
          if (columns) for (const column of line.columns) context.fillText(cut(context, column.title, Math.max(column.width, 44)), column.x, line.y + (twoLines ? 28 : 22));
        } else {
          context.fillStyle = colours.text;
          context.fillText(label(context, line.label, labels - 10), 0, line.y + line.height / 2);
          for (const cell of line.cells) this.cell(context, line, cell);
        }
      }
      this.light();
    }

    labelWidth() {
      const row = this.made.lines.find((line) => line.kind === "row" && line.cells.length);
      return row ? Math.min(...row.cells.map((cell) => cell.x)) : 80;
    }

    cell(context, line, cell) {
      const { side } = this;
      const state = side.files.states[cell.file];
      context.save();
      context.beginPath();
      context.roundRect(cell.x, line.y, cell.width, line.height, Math.min(4, cell.width / 2));
      const wrong = { missing: "bad", empty: "bad", unreadable: "bad", extra: "warn", "other save": "warn" }[state];
      context.fillStyle = wrong ? colours[`${wrong}-back`] : side.layers.length ? colours.sunk : kindTone(side.files.kinds[cell.file]);
      context.fill();
      context.clip();
      if (!wrong) this.segments(context, line, cell);
      else {
        context.strokeStyle = colours[wrong];
        context.globalAlpha = 0.45;
        context.lineWidth = 1.5;
        context.beginPath();
        for (let x = cell.x - line.height; x < cell.x + cell.width; x += 9) {
          context.moveTo(x, line.y + line.height);
          context.lineTo(x + line.height, line.y);
        }
        context.stroke();
        context.globalAlpha = 1;
        const reason = side.files.reasons[cell.file];
        let said = state === "extra" ? "left over" : state;
        context.font = `600 ${FONT}`;
        if (reason && context.measureText(`${said}: ${reason}`).width + 20 < cell.width) said = map.visible(`${said}: ${reason}`);
        const wide = context.measureText(said).width;
        if (wide + 20 < cell.width) {
          context.fillStyle = colours[`${wrong}-back`];
          context.fillRect(cell.x + 5, line.y + 4, wide + 10, line.height - 8);
          context.fillStyle = colours[wrong];
          context.fillText(said, cell.x + 10, line.y + line.height / 2);
        }
      }
      context.restore();
      context.beginPath();
      context.roundRect(cell.x + 0.5, line.y + 0.5, Math.max(1, cell.width - 1), line.height - 1, Math.min(4, cell.width / 2));
      context.strokeStyle = wrong ? colours[wrong] : colours.line;
      if (wrong) context.setLineDash([4, 3]);
      context.lineWidth = 1;
      context.stroke();
      context.setLineDash([]);
    }

    /* Pieces of a file. Those that are narrower than a pixel share it: the largest gives the colour. */
    segments(context, line, cell) {
      const segments = map.segmentsOf(this.side, cell.file);
      const room = this.side.files.bytes[cell.file] || 1;
      const scale = cell.width / room;
      const paint = tones[tone];
      let pixel = -1;
      let most = 0;
      let small = null;
      const flush = () => {
        if (small !== null) {
          context.fillStyle = small;
          context.fillRect(cell.x + pixel, line.y, 1.02, line.height);
        }
        small = null;
        most = 0;
      };
      for (let k = 0; k < segments.length; k += 1) {
        const x = segments.lo[k] * scale;
        const width = (segments.hi[k] - segments.lo[k]) * scale;
        if (width < 1.5) {
          const here = Math.floor(x);
          if (here !== pixel) flush();
          pixel = here;
          if (width >= most) {
            most = width;
            small = paint(this.side, segments.layer[k], segments.tensor[k]);
          }
          continue;
        }
        flush();
        context.fillStyle = paint(this.side, segments.layer[k], segments.tensor[k]);
        context.globalAlpha = segments.tensor[k] % 2 ? 0.78 : 1;
        context.fillRect(cell.x + x, line.y, width > 5 ? width - 1 : width, line.height);
        context.globalAlpha = 1;
      }
      flush();
    }

    /* The tensor that is shown, on a veil over everything else; and where the keyboard is. */
    light() {
      if (!this.made) return;
      const context = this.clean(this.over);
      const t = shown();
      const lines = this.visible();
      if (t >= 0) {
        const pieces = new Map();
        this.side.layers.forEach((layer, number) => {
          for (const piece of map.piecesOf(layer, t)) {
            if (!pieces.has(piece.file)) pieces.set(piece.file, []);
            const paint = map.isGone(this.side, piece.file) ? colours.bad : tones[tone](this.side, number, t);
            pieces.get(piece.file).push([piece.byte, map.endOf(piece, map.itemsize(layer, t)), paint]);
          }
        });
        context.globalAlpha = 0.72;
        context.fillStyle = colours.card;
        for (const line of lines) for (const cell of line.cells || []) {
          if (this.side.files.states[cell.file] !== "ok" && !pieces.has(cell.file)) continue;
          context.fillRect(cell.x - 1, line.y - 1, cell.width + 2, line.height + 2);
        }
        context.globalAlpha = 1;
        for (const line of lines) for (const cell of line.cells || []) {
          if (this.side.files.states[cell.file] !== "ok" && !pieces.has(cell.file)) continue;
          context.strokeStyle = map.isGone(this.side, cell.file) ? colours.bad : colours.line;
          context.lineWidth = 1;
          context.strokeRect(cell.x + 0.5, line.y + 0.5, Math.max(1, cell.width - 1), line.height - 1);
          const scale = cell.width / (map.room(this.side, cell.file) || 1);
          for (const [lo, hi, paint] of pieces.get(cell.file) || []) {
            const width = Math.max(3, (hi - lo) * scale);
            const x = Math.min(cell.x + lo * scale, cell.x + cell.width - 3);
            context.fillStyle = paint;
            context.fillRect(x, line.y - 2, width, line.height + 4);
            context.fillStyle = colours.strong;
            context.fillRect(x, line.y - 3, width, 2);
            context.fillRect(x, line.y + line.height + 1, width, 2);
          }
        }
      }
      const line = this.cursor.line >= 0 ? this.made.lines[this.cursor.line] : null;
      if (line && line.cells.length) {
        const cell = line.cells[Math.min(this.cursor.cell, line.cells.length - 1)];
        context.strokeStyle = colours.strong;
        context.lineWidth = 2;
        context.strokeRect(cell.x - 2, line.y - 2, cell.width + 4, line.height + 4);
      }
    }

    hit(event) {
      const bounds = this.box.getBoundingClientRect();
      const x = event.clientX - bounds.left;
      const y = event.clientY - bounds.top + this.box.scrollTop;
      const line = this.made.lines[map.lineAt(this.made, y)];
      if (!line || line.kind !== "row" || y > line.y + line.height) return null;
      const cell = line.cells.find((own) => x >= own.x - 1 && x <= own.x + own.width + 1);
      if (!cell) return null;
      const bytes = map.room(this.side, cell.file);
      const segments = map.segmentsOf(this.side, cell.file);
      const near = ((x - cell.x) / cell.width) * bytes;
      let segment = map.segmentAt(segments, near);
      const slack = (1.5 / cell.width) * bytes;
      if (segment < 0) segment = Math.max(map.segmentAt(segments, near + slack), map.segmentAt(segments, near - slack));
      return { line, cell, segment, tensor: segment < 0 ? -1 : segments.tensor[segment] };
    }

    about(cell, segment) {
      const { side } = this;
      const file = cell.file;
      const state = side.files.states[file];
      const where = map.homeOf(side, file);
      const lines = [];
      if (segment >= 0) {
        const segments = map.segmentsOf(side, file);
        const t = segments.tensor[segment];
        const layer = side.layers[segments.layer[segment]];
        const piece = map.piecesOf(layer, t).find((own) => own.file === file && own.byte === segments.lo[segment]);
        const bytes = piece ? piece.count * piece.rows * map.itemsize(layer, t) : 0;
        lines.push(names[t], `${layer.name}: ${piece ? map.partOf(piece, map.shapeOf(t)) : ""} of [${map.shapeOf(t).join(", ")}]`, `${data.dtypes[layer.dtypeOf(t)][0]}, ${size(bytes)}`);
      }
      const reason = side.files.reasons[file];
      const there = state === "ok" ? size(side.files.bytes[file]) : `${state === "extra" ? "left over" : state}${reason ? `: ${reason}` : ""}`;
      lines.push(where === side.files.names[file] ? where : `${where}: ${side.files.names[file]}`, `${side.files.kinds[file]} file, ${there}`);
      return lines;
    }

    point(event) {
      const hit = this.hit(event);
      if (!hit) {
        hide();
        point(-1);
        return;
      }
      tip(this.about(hit.cell, hit.segment), event.clientX, event.clientY, hit.tensor >= 0);
      point(hit.tensor);
    }

    key(event) {
      const lines = this.made.lines;
      const cursor = this.cursor;
      const rows = (from, by) => {
        let n = from + by;
        while (n >= 0 && n < lines.length && (lines[n].kind !== "row" || !lines[n].cells.length)) n += by;
        return n >= 0 && n < lines.length ? n : from;
      };
      const moved = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const aside = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (moved) {
        cursor.line = rows(cursor.line, moved);
        cursor.segment = -1;
      } else if (event.key === "Home") {
        cursor.line = rows(-1, 1);
        cursor.segment = -1;
      } else if (event.key === "End") {
        cursor.line = rows(lines.length, -1);
        cursor.segment = -1;
      } else if (aside) {
        if (cursor.line < 0) cursor.line = rows(-1, 1);
        const { cells } = lines[cursor.line] || { cells: [] };
        if (!cells.length) return;
        cursor.cell = Math.min(cursor.cell, cells.length - 1);
        const next = cursor.segment + aside;
        const many = map.segmentsOf(this.side, cells[cursor.cell].file).length;
        if (next >= -1 && next < many) cursor.segment = next;
        else if (cells[cursor.cell + aside]) {
          cursor.cell += aside;
          cursor.segment = aside > 0 ? -1 : map.segmentsOf(this.side, cells[cursor.cell].file).length - 1;
        }
      } else if (event.key === "Enter" || event.key === " ") {
        if (pointed >= 0) keep(pointed === kept ? -1 : pointed);
      } else if (event.key === "Escape") {
        keep(-1);
        point(-1);
      } else return;
      event.preventDefault();
      const line = lines[cursor.line];
      if (!line || event.key === "Escape") return;
      if (line.y < this.box.scrollTop) this.box.scrollTop = Math.max(0, line.y - 50);
      if (line.y + line.height > this.box.scrollTop + this.height) this.box.scrollTop = line.y + line.height - this.height + 8;
      const cell = line.cells[Math.min(cursor.cell, line.cells.length - 1)];
      const segments = map.segmentsOf(this.side, cell.file);
      point(cursor.segment < 0 ? -1 : segments.tensor[cursor.segment]);
      const lines_ = this.about(cell, cursor.segment);
      say(map.visible(lines_.join(". ")));
      const bounds = this.box.getBoundingClientRect();
      const x = cursor.segment < 0 ? cell.x : cell.x + (segments.lo[cursor.segment] / (map.room(this.side, cell.file) || 1)) * cell.width;
      tip(lines_, bounds.left + x, bounds.top + line.y - this.box.scrollTop + line.height, cursor.segment >= 0);
      this.light();
    }
  }
  const FONT = "13px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', Arial, sans-serif";
  /* A row's label; where there is no room for it, with letters for the axes. */
  const label = (context, own, width) => {
    const text = map.visible(own);
    if (context.measureText(text).width <= width) return text;
    return cut(context, text.replace(/\b(?:layer|tensor rank|expert rank|expert|stage|data rank) (?=\d)/g, (axis) => (axis[0].toUpperCase())), width);
  };
  const cut = (context, text, width) => {
    if (width <= 8) return "";
    if (context.measureText(text).width <= width) return text;
    let low = 0;
    let high = text.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (context.measureText(`${text.slice(0, middle)}\u2026`).width <= width) low = middle;
      else high = middle - 1;
    }
    return low ? `${text.slice(0, low)}\u2026` : "";
  };

  const tip = (lines, x, y, tensor) => {
    const box = $("tip");
    box.replaceChildren(...lines.map((line, n) => made("div", { class: n === 0 ? (tensor ? "mono first" : "first") : "" }, quoted(line))));
    box.hidden = false;
    box.style.left = box.style.top = "0";
    const bounds = box.getBoundingClientRect();
    box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - bounds.width - 12))}px`;
    box.style.top = `${y + 18 + bounds.height > innerHeight ? Math.max(8, y - bounds.height - 14) : y + 18}px`;
  };
  const hide = () => { $("tip").hidden = true; };

  const pictures = data.sides.map((side) => new Picture(side));
  $("sides").append(...pictures.map((picture) => picture.root));
  const light = () => { for (const picture of pictures) picture.light(); };
  const point = (t) => {
    if (t === pointed) return;
    pointed = t;
    light();
  };
  /* The address names the tensor that is kept, so that a link to it can be sent. */
  const remember = () => {
    const hash = map.addressOf(kept);
    if (location.hash === hash) return;
    try {
      history.replaceState(null, "", hash || location.pathname + location.search);
    } catch { /* a page in a frame may have no history */ }
  };
  const recall = () => {
    const t = map.tensorAt(location.hash);
    if (t >= 0 && t !== kept) keep(t);
  };
  const keep = (t) => {
    kept = t;
    pointed = -1;
    light();
    detail();
    remember();
    if (lines) lines.show();
    if (t >= 0) say(`${names[t]}. ${count(map.shares(data.sides[0], t).length, "file")}.`);
  };

  /* One tensor: what it is, a picture of who holds which rows, and its pieces. */
  const MOST_PIECES = 120;
  const holderOf = (side, file) => {
    if (file < 0) return -1;
    if (!side.holders) {
      const seen = new Map();
      side.holders = side.files.names.map((_, own) => {
        const home = map.homeOf(side, own);
        if (!seen.has(home)) seen.set(home, seen.size);
        return seen.get(home);
      });
    }
    return side.holders[file];
  };
  const detail = () => {
    const box = $("detail");
    box.hidden = kept < 0;
    if (kept < 0) return;
    const t = kept;
    const shape = map.shapeOf(t);
    const tied = data.aliases.filter(([, own]) => own === names[t]).map(([dropped]) => dropped);
    $("detail-title").replaceChildren(quoted(names[t]));
    const gone = map.lost(data.sides[0], t);
    const lacks = gone ? [made("span", { class: "chip lacks" }, `lacks ${count(gone, "element")}`)] : [];
    const facts = [`shape [${shape.join(", ")}]`, map.dtypeOf(t)[0], data.roles[data.tensors.roles[t]], count(map.numelOf(t), "element"), size(map.bytesOf(t))];
    const parts = [made("p", { class: "chips" }, ...lacks, ...facts.map((fact) => made("span", { class: "chip" }, fact)), ...tied.map((name) => made("span", { class: "chip" }, "also called ", quoted(name))))];
    const pictured = made("div", { class: "matrices" });
    data.sides.forEach((side) => { if (side.layers.length) pictured.append(matrix(side, t)); });
    parts.push(pictured);
    for (const side of data.sides) parts.push(table(side, t));
    const close = made("button", { type: "button" }, "Let it go");
    close.addEventListener("click", () => keep(-1));
    box.replaceChildren($("detail-title"), ...parts, close);
  };
  /* Red stripes, for what is gone. */
  const hatch = (context) => {
    const tile = made("canvas");
    tile.width = 8;
    tile.height = 8;
    const own = tile.getContext("2d");
    own.fillStyle = colours["bad-back"];
    own.fillRect(0, 0, 8, 8);
    own.strokeStyle = colours.bad;
    own.lineWidth = 2;
    for (const x of [-8, 0, 8]) {
      own.beginPath();
      own.moveTo(x - 2, 10);
      own.lineTo(x + 10, -2);
      own.stroke();
    }
    return context.createPattern(tile, "repeat");
  };
  const matrix = (side, t) => {
    const shape = map.shapeOf(t);
    const columns = shape.length > 1 ? shape.slice(1).reduce((all, extent) => all * extent, 1) : map.numelOf(t);
    const rows = shape.length > 1 ? shape[0] : 1;
    const most = Math.min(360, $("sides").clientWidth - 20);
    const ratio = Math.max(0.12, Math.min(1, rows / Math.max(1, columns)));
    const width = Math.round(rows > columns ? Math.max(90, most * Math.max(0.3, columns / rows)) : most);
    const height = Math.round(rows > columns ? 240 : Math.max(34, Math.min(240, width * ratio)));
    const canvas = made("canvas", { role: "img", "aria-label": `Which rank holds which part of ${names[t]}: as in the table.` });
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    context.fillStyle = colours.sunk;
    context.fillRect(0, 0, width, height);
    const held = [];
    const hatched = hatch(context);
    for (const piece of map.piecesOf(side.layers[0], t)) {
      const number = holderOf(side, piece.file);
      if (!held.includes(piece.file)) held.push(piece.file);
      context.fillStyle = map.isGone(side, piece.file) ? hatched : holder(number);
      for (const [x, y, w, h] of map.rectangles(piece, columns)) {
        const right = ((x + w) / columns) * width;
        const bottom = ((y + h) / rows) * height;
        context.fillRect((x / columns) * width, (y / rows) * height, Math.max(0.6, right - (x / columns) * width), Math.max(0.6, bottom - (y / rows) * height));
      }
    }
    const keys = made("ul", { class: "legend" }, ...held.slice(0, HOLDERS).map((file) => {
      const gone = map.isGone(side, file);
      const key = made("i", { class: gone ? "key bad" : "key", "aria-hidden": "true" });
      if (!gone) key.style.background = holder(holderOf(side, file));
      return made("li", {}, key, quoted(`${map.homeOf(side, file)}${gone ? `: ${side.files.states[file]}` : ""}`));
    }));
    if (held.length > HOLDERS) keys.append(made("li", {}, `and ${count(held.length - HOLDERS, "more file")}`));
    const said = shape.length > 1 ? `${grouped(rows)} rows, ${count(columns, "column")}` : count(columns, "element");
    return made("figure", {}, made("figcaption", {}, made("b", {}, data.sides.length > 1 ? side.title : "Who holds which part"), made("span", { class: "soft" }, ` ${said}`)), canvas, keys);
  };
  const table = (side, t) => {
    const found = [];
    let all = 0;
    for (const layer of side.layers) for (const piece of map.piecesOf(layer, t)) {
      all += 1;
      if (found.length >= MOST_PIECES) continue;
      const bytes = piece.count * piece.rows * map.itemsize(layer, t);
      const gone = map.isGone(side, piece.file);
      const home = `${map.homeOf(side, piece.file)}${gone ? `: ${side.files.states[piece.file]}` : ""}`;
      const cells = [layer.name, map.partOf(piece, map.shapeOf(t)), home, piece.file < 0 ? "" : side.files.names[piece.file], piece.file < 0 || gone ? "" : grouped(piece.byte), size(bytes)];
      found.push(made("tr", gone ? { class: "wrong" } : {}, ...cells.map((cell, n) => made("td", n > 3 ? { class: "number" } : {}, quoted(cell)))));
    }
    const heads = ["What", "Part", "Held by", "File", "From byte", "Size"];
    const head = made("tr", {}, ...heads.map((name, n) => made("th", { scope: "col", ...(n > 3 ? { class: "number" } : {}) }, name)));
    const caption = made("caption", {}, `${data.sides.length > 1 ? `${side.title}: ` : ""}${count(all, "piece")}${all > found.length ? `, of which the first ${found.length} are listed` : ""}`);
    return made("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Pieces of ${names[t]}` }, made("table", { class: "pieces" }, caption, made("thead", {}, head), made("tbody", {}, ...found)));
  };

  /* The list of tensors. */
  class Lines {
    constructor() {
      this.found = [];
      this.row = 0;
      $("role").append(made("option", { value: "" }, "any role"), ...[...used.role].sort().map((n) => made("option", { value: n }, data.roles[n])));
      const own = [...new Set(data.tensors.dtypes)];
      $("dtype").append(made("option", { value: "" }, "any dtype"), ...own.map((n) => made("option", { value: n }, data.dtypes[n][0])));
      const anyGone = data.sides[0].files.names.some((_, file) => map.isGone(data.sides[0], file));
      $("lacking").hidden = !anyGone || !names.some((_, t) => map.lost(data.sides[0], t));
      for (const id of ["search", "role", "dtype", "order", "lacking"]) $(id).addEventListener("input", () => this.search());
      $("search").addEventListener("keydown", (event) => {
        if (event.key === "ArrowDown") {
          event.preventDefault();
          this.focus(0);
        }
      });
      this.box = $("list");
      this.box.addEventListener("scroll", () => this.show());
      this.box.addEventListener("keydown", (event) => this.key(event));
      this.box.addEventListener("click", (event) => {
        const line = event.target.closest("[data-tensor]");
        if (!line) return;
        this.row = Number(line.getAttribute("aria-rowindex")) - 2;
        keep(Number(line.dataset.tensor) === kept ? -1 : Number(line.dataset.tensor));
      });
      this.box.addEventListener("pointerover", (event) => {
        const line = event.target.closest("[data-tensor]");
        point(line ? Number(line.dataset.tensor) : -1);
      });
      this.box.addEventListener("pointerleave", () => point(-1));
      this.search();
    }

    get height() {
      return narrow.matches ? 58 : 36;
    }

    search() {
      const number = (id) => ($(id).value === "" ? null : Number($(id).value));
      this.found = map.search($("search").value, { role: number("role"), dtype: number("dtype"), lacking: $("lacking").value === "1", order: $("order").value });
      const bytes = this.found.reduce((all, t) => all + map.bytesOf(t), 0);
      const of = this.found.length === names.length ? "" : ` of ${grouped(names.length)}`;
      $("found").textContent = `${grouped(this.found.length)}${of} ${names.length === 1 ? "tensor" : "tensors"}, ${size(bytes)}`;
      this.box.setAttribute("aria-rowcount", this.found.length + 1);
      this.row = 0;
      this.box.scrollTop = 0;
      this.fit();
      this.show();
    }

    fit() {
      const wanted = Math.max(1, names.length) * this.height + this.box.firstElementChild.offsetHeight + 3;
      this.box.style.height = `${Math.min(wanted, 460)}px`;
    }

    show() {
      const height = this.height;
      const first = Math.max(0, Math.floor(this.box.scrollTop / height) - 4);
      const last = Math.min(this.found.length, first + Math.ceil(this.box.clientHeight / height) + 10);
      const active = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.tensor : undefined;
      $("lines").style.height = `${this.found.length * height}px`;
      const lines = [];
      for (let n = first; n < last; n += 1) lines.push(this.line(n, height));
      if (this.row < first || this.row >= last) if (this.row < this.found.length) lines.push(this.line(this.row, height));
      if (!this.found.length) lines.push(made("p", { class: "soft none" }, "No tensor is called so."));
      $("lines").replaceChildren(...lines);
      if (active !== undefined) {
        const again = $("lines").querySelector(`[data-tensor="${active}"]`);
        if (again) again.focus({ preventScroll: true });
      }
    }

    line(n, height) {
      const t = this.found[n];
      const canvas = made("canvas", { class: "held", "aria-hidden": "true" });
      const held = map.shares(data.sides[0], t);
      this.share(canvas, held, t);
      const lost = held.filter(([file]) => map.isGone(data.sides[0], file)).length;
      const all = held.length === 1 ? map.homeOf(data.sides[0], held[0][0]) : count(held.length, "file");
      const told = lost ? `${all}, ${lost === held.length ? "gone" : `${lost} gone`}` : all;
      const line = made("div", {
        class: `line${t === kept ? " kept" : ""}`, role: "row", "aria-rowindex": n + 2, "aria-selected": t === kept, "data-tensor": t, tabindex: n === this.row ? 0 : -1,
      },
      made("span", { role: "gridcell", class: "name mono", title: map.visible(names[t]) }, quoted(names[t])),
      made("span", { role: "gridcell", class: "shape mono" }, `[${map.shapeOf(t).join(", ")}]`),
      made("span", { role: "gridcell", class: "kind" }, `${map.dtypeOf(t)[0]}, ${data.roles[data.tensors.roles[t]]}`),
      made("span", { role: "gridcell", class: "number" }, size(map.bytesOf(t))),
      made("span", { role: "gridcell", class: "owner" }, canvas, made("span", { class: "told" }, quoted(told))));
      line.style.top = `${n * height}px`;
      return line;
    }

    share(canvas, held, t) {
      const width = 84;
      canvas.width = width * devicePixelRatio;
      canvas.height = 10 * devicePixelRatio;
      const context = canvas.getContext("2d");
      context.scale(devicePixelRatio, devicePixelRatio);
      const all = map.numelOf(t) || 1;
      const hatched = held.some(([file]) => map.isGone(data.sides[0], file)) && hatch(context);
      let x = 0;
      for (const [file, numel] of held) {
        const part = (numel / all) * width;
        context.fillStyle = map.isGone(data.sides[0], file) ? hatched : holder(holderOf(data.sides[0], file));
        context.fillRect(x, 0, part > 3 ? part - 1 : part, 10);
        x += part;
      }
    }

    focus(n) {
      this.row = Math.max(0, Math.min(this.found.length - 1, n));
      const height = this.height;
      const head = this.box.firstElementChild.offsetHeight;
      const top = this.row * height;
      if (top < this.box.scrollTop) this.box.scrollTop = top;
      if (top + height + head > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + height + head - this.box.clientHeight;
      this.show();
      const line = $("lines").querySelector(`[data-tensor="${this.found[this.row]}"]`);
      if (line) line.focus({ preventScroll: true });
      point(this.found.length ? this.found[this.row] : -1);
    }

    key(event) {
      const page = Math.floor(this.box.clientHeight / this.height) - 1;
      const to = { ArrowDown: this.row + 1, ArrowUp: this.row - 1, PageDown: this.row + page, PageUp: this.row - page, Home: 0, End: this.found.length - 1 }[event.key];
      if (to !== undefined) this.focus(to);
      else if ((event.key === "Enter" || event.key === " ") && this.found.length) keep(this.found[this.row] === kept ? -1 : this.found[this.row]);
      else if (event.key === "Escape") keep(-1);
      else return;
      event.preventDefault();
    }
  }

  const redraw = () => {
    readColours();
    legend();
    for (const picture of pictures) picture.measure();
    detail();
    if (lines) {
      lines.fit();
      lines.show();
    }
  };
  let lines = null;
  readColours();
  if ($("list")) lines = new Lines();
  $("colour").addEventListener("input", (event) => {
    tone = event.target.value;
    legend();
    for (const picture of pictures) picture.draw();
  });
  if (!names.length) $("colour").closest("label").remove();
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && $("search") && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      event.preventDefault();
      $("search").focus();
    }
  });
  document.addEventListener("zckpt-theme", redraw);
  let due = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(due);
    due = requestAnimationFrame(redraw);
  });
  redraw();
  recall();
  addEventListener("hashchange", recall);
})();
