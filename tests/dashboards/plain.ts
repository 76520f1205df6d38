// Grafana's types as JSON has them: an enum's value is its text; a query is Prometheus' or a tag's;
// a panel's options and field options are those of its kind.
import type * as grafana from '@grafana/schema';
import type * as barGauge from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as heatMap from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeSeries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

type Plain<T> = T extends string
  ? `${T}`
  : T extends (infer Element)[]
    ? Plain<Element>[]
    : T extends object
      ? { [Key in keyof T]: Plain<T[Key]> }
      : T;

type Query = Plain<grafana.DataQuery> & {
  expr?: string;
  legendFormat?: string;
  format?: 'time_series' | 'table' | 'heatmap';
  instant?: boolean;
  range?: boolean;
};

type Tags = { limit: number; matchAny: boolean; tags: string[]; type: 'tags' };

type Mark = Omit<Plain<grafana.AnnotationQuery>, 'target'> & {
  target: Query | Tags;
  expr?: string;
  titleFormat?: string;
  textFormat?: string;
  tagKeys?: string;
};

type Fields<Custom> = Omit<Plain<grafana.FieldConfigSource>, 'defaults'> & {
  defaults: Omit<Plain<grafana.FieldConfig>, 'custom'> & { custom?: Plain<Custom> };
};

type PanelOf<Type, Options, Custom> = Omit<
  Plain<grafana.Panel>,
  'type' | 'options' | 'fieldConfig' | 'targets'
> & { type: Type; options: Plain<Options>; fieldConfig: Fields<Custom>; targets: Query[] };

type Panel =
  | PanelOf<'bargauge', barGauge.Options, object>
  | PanelOf<'heatmap', Partial<heatMap.Options>, heatMap.FieldConfig>
  | PanelOf<'stat', stat.Options, object>
  | PanelOf<'table', table.Options, table.FieldConfig>
  | PanelOf<'timeseries', timeSeries.Options, timeSeries.FieldConfig>
  | Plain<grafana.RowPanel>;

export type Dashboard = Omit<Plain<grafana.Dashboard>, 'annotations' | 'panels'> & {
  annotations: { list: Mark[] };
  panels: Panel[];
};
