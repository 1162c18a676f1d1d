/** The model as it is built: a column of layers, with every attention head and every recurrent group a switch. */

import { el, fill, rove, setAttribute } from "play/dom.js";

const SITES = { memory: "memory", conv: "convolution", state: "state", block: "whole block" };

/**
 * Build the column.
 *
 * @param container  Element to fill.
 * @param layers     `layers` of the provider's description.
 * @param change     Called with a function that changes settings (controls.js) in place, and a description of the change.
 * @param try_       Called with such a function; returns why it is not available, or "".
 * @returns An object with `update(controls)`.
 */
export function layerColumn(container, layers, change, try_) {
  const switches = []; // {button, isOn(controls), flip(controls)}
  const rows = [];
  let layerCut = "memory";

  function toggle(name, classes, text, isOn, flip) {
    const button = el(
      "button",
      {
        type: "button",
        role: "switch",
        class: classes,
        "aria-label": name,
        title: name,
        tabindex: -1,
        onclick: () => {
          if (button.getAttribute("aria-disabled") !== "true") change(flip, name);
          else change(null, button.title);
        },
      },
      text,
    );
    switches.push({ button, name, isOn, flip });
    return button;
  }

  const heads = (layer) => Array.from({ length: layer.attention?.heads ?? 0 }, (_, i) => `${layer.index}.${i}`);
  const allHeads = layers.flatMap(heads);
  const recurrent = layers.filter((layer) => layer.recurrent);

  function headsSwitch(name, classes, text, members) {
    const isOn = (controls) => !members.every((head) => controls.heads.off.includes(head));
    return toggle(name, classes, text, isOn, (controls) => {
      const rest = controls.heads.off.filter((head) => !members.includes(head));
      controls.heads.off = isOn(controls) ? [...rest, ...members] : rest;
    });
  }

  function cutSwitch(name, classes, text, members, site) {
    const isCut = (controls, layer) => {
      const cut = controls.recurrent.cut[layer.index];
      return site() === "layer" ? Boolean(cut) : cut === site() || (cut === "memory" && site() !== "block");
    };
    const isOn = (controls) => !members.every((layer) => isCut(controls, layer));
    return toggle(name, classes, text, isOn, (controls) => {
      const off = isOn(controls);
      for (const layer of members) setCut(controls.recurrent.cut, layer, site(), off);
    });
  }

  function setCut(cut, layer, site, off) {
    const other = { conv: "state", state: "conv" }[site];
    const before = cut[layer.index];
    delete cut[layer.index];
    if (site === "layer") {
      if (off) cut[layer.index] = layerCut;
    } else if (off) {
      cut[layer.index] = before === other ? "memory" : site;
    } else if (before === "memory" && layer.recurrent[other]) {
      cut[layer.index] = other;
    }
  }

  function attentionRow(layer) {
    const own = heads(layer);
    const part = layer.attention;
    const about = part.window ? `window of ${part.window} tokens` : "sees all earlier tokens";
    const label = headsSwitch(`layer ${layer.index}, all ${own.length} heads`, "layer", "attention", own);
    const cells = own.map((head, i) => headsSwitch(`layer ${layer.index}, head ${i}`, "cell", String(i), [head]));
    return row(layer, "attention", `${own.length} heads over ${part.kv_heads} of keys and values, ${about}`, label, cells);
  }

  function recurrentRow(layer) {
    const part = layer.recurrent;
    const label = cutSwitch(`layer ${layer.index}, recurrent memory`, "layer", "recurrent", [layer], () => "layer");
    const kind = { heads: "head", blocks: "block", channels: "channels" }[part.group_kind] ?? "group";
    const cells = Array.from({ length: part.groups }, (_, i) => {
      const group = `${layer.index}.${i}`;
      const isOn = (controls) => !controls.recurrent.groups.includes(group);
      return toggle(`layer ${layer.index}, recurrent ${kind} ${i}`, "cell", String(i), isOn, (controls) => {
        const rest = controls.recurrent.groups.filter((other) => other !== group);
        controls.recurrent.groups = isOn(controls) ? [...rest, group] : rest;
      });
    });
    for (const site of ["conv", "state"]) {
      if (part[site]) cells.push(cutSwitch(`layer ${layer.index}, ${SITES[site]}`, "site", site, [layer], () => site));
    }
    const about = part.groups ? `${part.mixer}: ${part.groups} ${part.group_kind}` : `${part.mixer}: ${part.no_groups}`;
    return row(layer, "recurrent", about, label, cells);
  }

  function row(layer, kind, about, label, cells) {
    rows.push([label, ...cells]);
    return el(
      "div",
      { class: `row ${kind}`, role: "group", "aria-label": `Layer ${layer.index}: ${kind}. ${about}`, title: about },
      el("span", { class: "index" }, String(layer.index)),
      label,
      el("span", { class: "cells" }, cells),
    );
  }

  const sides = [];
  if (allHeads.length) sides.push(headsSwitch("all attention heads", "side attention", "All attention heads", allHeads));
  if (recurrent.length) {
    sides.push(cutSwitch("all recurrent layers", "side recurrent", "All recurrent layers", recurrent, () => "layer"));
  }
  rows.push(sides);
  const column = el("div", { class: "stack" });
  for (const layer of layers) {
    if (layer.recurrent) column.append(recurrentRow(layer));
    if (layer.attention) column.append(attentionRow(layer));
    if (!layer.recurrent && !layer.attention) {
      column.append(el("div", { class: "row other" }, el("span", { class: "index" }, String(layer.index)), "neither"));
    }
  }
  const frame = el("div", { class: "layers" }, el("div", { class: "sides" }, sides), column);
  fill(container, frame);
  rove(frame, () => rows);
  if (rows.flat().length) rows.flat()[0].tabIndex = 0;

  return {
    /** What the switch of a recurrent layer, or of all, cuts: "memory" or "block". */
    setLayerCut(site) {
      layerCut = site;
    },
    /** Show settings. */
    update(controls) {
      for (const { button, name, isOn, flip } of switches) {
        setAttribute(button, "aria-checked", isOn(controls));
        const why = try_(flip);
        setAttribute(button, "aria-disabled", why ? "true" : null);
        setAttribute(button, "title", why || `${name}: ${isOn(controls) ? "on" : "off"}`);
      }
    },
  };
}
