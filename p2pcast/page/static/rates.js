// Rates of receiving, by peer and in all, from the counts of two pictures.
import { set } from "/page/views.js";

const KEPT_S = 600, LEAST_S = 0.4;

export class Rates {
  #before = new Map(); // peer: [time, bytes, rate]
  #times = [];
  #totals = [];
  #plot = null;

  note(picture) {
    let total = 0;
    for (const [name, row] of Object.entries(picture.peers)) {
      const [time, bytes, rate] = this.#before.get(name) ?? [picture.time, row.bytes ?? 0, 0];
      const passed = picture.time - time;
      if (passed >= LEAST_S) this.#before.set(name, [picture.time, row.bytes ?? 0, Math.max(0, (row.bytes ?? 0) - bytes) / passed / 1e6]);
      else if (passed <= 0) this.#before.set(name, [picture.time, row.bytes ?? 0, rate]);
      total += this.#before.get(name)?.[2] ?? 0;
    }
    for (const name of this.#before.keys()) if (!(name in picture.peers)) this.#before.delete(name);
    if (this.#times.length === 0 || picture.time > this.#times.at(-1)) {
      this.#times.push(picture.time);
      this.#totals.push(total);
    }
    while (this.#times.length > 2 && this.#times[0] < picture.time - KEPT_S) {
      this.#times.shift();
      this.#totals.shift();
    }
  }

  // Megabytes a second; null before two counts.
  of(name) {
    return this.#before.get(name)?.[2] ?? null;
  }

  draw(box, facts) {
    const width = Math.max(200, box.clientWidth), style = getComputedStyle(document.body);
    if (this.#plot === null) {
      const axis = { stroke: style.color, grid: { stroke: style.getPropertyValue("--line"), width: 1 } };
      this.#plot = new uPlot({
        width, height: 180, legend: { show: false }, cursor: { show: false },
        axes: [axis, { ...axis, label: "MB/s" }],
        series: [{}, { stroke: style.getPropertyValue("--accent"), width: 2 }],
      }, [this.#times, this.#totals], box);
    } else {
      if (this.#plot.width !== width) this.#plot.setSize({ width, height: 180 });
      this.#plot.setData([this.#times, this.#totals]);
    }
    const now = this.#totals.at(-1) ?? 0, most = Math.max(0, ...this.#totals);
    set(facts, `All peers together receive ${now.toFixed(2)} MB/s now; at most ${most.toFixed(2)} MB/s since this page was opened.`);
  }
}
