// Draws panels of a dashboard with Grafana's own components, from what Prometheus answered.
//
// window.SHOWN: [{panel, answers: [{refId, legend, instant, stepMs, result}]}]; window.SPAN: [from,
// to] in seconds.
// What belongs to Grafana's server side is done here by hand: frames from answers, and the merging of
// field options, whose registry lives in Grafana itself.
import React from 'react';
import { createRoot } from 'react-dom/client';
import { firstValueFrom } from 'rxjs';
import {
  FieldType, createTheme, dateTime, formattedValueToString, getDisplayProcessor, getFieldDisplayName,
  standardTransformers, standardTransformersRegistry, toDataFrame, transformDataFrame,
} from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, ThemeContext, TimeSeries } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';

const theme = createTheme({ colors: { mode: 'dark' } });
const [from, to] = window.SPAN.map((seconds) => dateTime(seconds * 1000));
const timeRange = { from, to, raw: { from, to } };
const COLUMN = 66, LINE = 38, GAP = 8;

const { mergeTransformer, organizeFieldsTransformer, renameByRegexTransformer } = standardTransformers;
standardTransformersRegistry.setInit(() =>
  [mergeTransformer, organizeFieldsTransformer, renameByRegexTransformer].map((one) => ({
    id: one.id, name: one.name, transformation: async () => one,
  })));

const filled = (template, labels) =>
  template.replace(/\{\{(\w+)\}\}/g, (_, name) => labels[name] ?? '').trim();

function seriesFrames({ refId, legend, instant, stepMs, result }) {
  return result.map(({ metric, value, values }) => {
    const points = instant ? [value] : values;
    const named = legend ? { displayNameFromDS: filled(legend, metric) } : {};
    return toDataFrame({ refId, fields: [
      { name: 'Time', type: FieldType.time, config: { interval: stepMs },
        values: points.map(([time]) => time * 1000) },
      { name: 'Value', type: FieldType.number, labels: metric, config: named,
        values: points.map(([, number]) => Number(number)) },
    ] });
  });
}

function tableFrame({ refId, result }, several) {
  const names = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))].sort();
  return toDataFrame({ refId, fields: [
    { name: 'Time', type: FieldType.time, values: result.map(({ value }) => value[0] * 1000) },
    ...names.map((name) => ({
      name, type: FieldType.string, values: result.map(({ metric }) => metric[name] ?? ''),
    })),
    { name: several ? `Value #${refId}` : 'Value', type: FieldType.number,
      values: result.map(({ value }) => Number(value[1])) },
  ] });
}

function rangeOf(values) {
  const known = values.filter(Number.isFinite);
  const [min, max] = [Math.min(...known), Math.max(...known)];
  return known.length ? { min, max, delta: max - min } : undefined;
}

function configure(frames, { defaults, overrides }) {
  let index = 0;
  for (const frame of frames) {
    for (const field of frame.fields) {
      if (field.type === FieldType.time) continue;
      const name = getFieldDisplayName(field, frame);
      const own = Object.assign({}, ...overrides
        .filter(({ matcher }) => matcher.options === name)
        .flatMap(({ properties }) => properties.map(({ id, value }) =>
          id === 'custom.cellOptions' ? { custom: { ...defaults.custom, cellOptions: value } }
            : { [id]: value })));
      const color = { mode: frame.byLimits ? 'thresholds' : 'palette-classic' };
      const unit = field.type === FieldType.number ? {} : { unit: undefined };
      field.config = { color, custom: {}, ...defaults, ...field.config, ...unit, ...own };
      field.state = { ...field.state, seriesIndex: index++, range: rangeOf(field.values) };
      field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
    }
  }
  return frames;
}

async function framesOf({ panel, answers }) {
  const asTable = panel.type === 'table';
  const raw = asTable
    ? answers.filter(({ result }) => result.length).map((one) => tableFrame(one, answers.length > 1))
    : answers.flatMap(seriesFrames);
  const context = { interpolate: (text) => text };
  const changed = await firstValueFrom(transformDataFrame(panel.transformations ?? [], raw, context));
  changed.forEach((frame) => { frame.byLimits = asTable || panel.type !== 'timeseries'; });
  return configure(changed, panel.fieldConfig);
}

function newest(frame) {
  const field = frame.fields[1];
  const shown = field.display(field.values[field.values.length - 1]);
  return { field, shown: { ...shown, title: getFieldDisplayName(field, frame) } };
}

function Stat({ frames, width, height, options }) {
  return <div style={{ display: 'flex' }}>{frames.map((frame, number) => {
    const { field, shown } = newest(frame);
    const sparkline = { x: frame.fields[0], y: field, timeRange };
    return <BigValue key={number} theme={theme} width={width / frames.length} height={height}
      value={frames.length > 1 ? shown : { ...shown, title: undefined }} sparkline={sparkline}
      colorMode={options.colorMode} graphMode={options.graphMode} count={frames.length} />;
  })}</div>;
}

function Bars({ frames, width, height }) {
  const each = Math.min(60, height / frames.length - GAP);
  return <div>{frames.map((frame, number) => {
    const { field, shown } = newest(frame);
    const highest = Math.max(...frames.map((one) => newest(one).shown.numeric));
    const config = { min: 0, max: highest, ...field.config };
    return <BarGauge key={number} theme={theme} width={width} height={each} field={config}
      value={shown} display={field.display} orientation="horizontal" displayMode="basic" />;
  })}</div>;
}

function Graph({ frames, width, height }) {
  return <TimeSeries width={width} height={height} frames={frames} timeRange={timeRange}
    timeZone="utc" structureRev={1} options={{}}
    legend={{ displayMode: 'list', placement: 'bottom', calcs: [], showLegend: true }} />;
}

function Grid({ frames, width, height }) {
  return <TableNG data={frames[0]} width={width} height={height} cellHeight="sm" noHeader={false} />;
}

const KINDS = { stat: Stat, bargauge: Bars, timeseries: Graph, table: Grid };

function Shown({ panel, frames }) {
  const { x, y, w, h } = panel.gridPos;
  const width = w * COLUMN - GAP, height = h * LINE - GAP;
  const Kind = KINDS[panel.type];
  return <div className="panel" data-title={panel.title}
    style={{ position: 'absolute', left: x * COLUMN, top: y * LINE }}>
    <PanelChrome title={panel.title} width={width} height={height}>
      {(innerWidth, innerHeight) => frames.length
        ? <Kind frames={frames} width={innerWidth} height={innerHeight} options={panel.options} />
        : <div className="empty">No data</div>}
    </PanelChrome>
  </div>;
}

async function main() {
  const shown = await Promise.all(window.SHOWN.map(async (one) =>
    ({ panel: one.panel, frames: await framesOf(one) })));
  const lines = Math.max(...shown.map(({ panel }) => panel.gridPos.y + panel.gridPos.h));
  const { background, text } = theme.colors;
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ position: 'relative', width: 24 * COLUMN, height: lines * LINE, padding: GAP,
        background: background.canvas, color: text.primary, fontFamily: theme.typography.fontFamily,
        fontSize: theme.typography.fontSize }}>
        {shown.map((one) => <Shown key={one.panel.id} {...one} />)}
      </div>
    </ThemeContext.Provider>);
}

main().catch((error) => { document.title = `failed: ${error.stack}`; });
